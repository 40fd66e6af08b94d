"""The page of `hacpo-mega watch`: what it ships, and how it behaves in a real browser.

The browser's requests are answered here, by the routes' tables, under the server's own policy. Without playwright or a
Chromium those tests are skipped.
"""

import hashlib
import json
import math
import re
import shutil
from collections.abc import Iterator
from typing import Any
from urllib.parse import parse_qs, urlparse

import pytest
from repository import ROOT

from hacpo_mega.models.files.visible import visible
from hacpo_mega.report.catalogue import catalogue

PAGE = ROOT / "hacpo_mega" / "watch" / "page"
OURS = sorted(path for path in PAGE.glob("*.js") if path.name != "uplot.js")
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
HOST = "http://127.0.0.1:7"  # nobody listens: every request is answered by the test
POLICY = "default-src 'self'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'"
TYPES = {".js": "text/javascript", ".css": "text/css", ".html": "text/html", ".svg": "image/svg+xml"}
STEPS = list(range(1, 41))
# A tag in each of its forms; any that lives sets window.alive, or is found as an element.
HOSTILE = [
    "<script>window.alive=1</script>",
    "<img src=x onerror=window.alive=1>",
    "<svg onload=window.alive=1><a xlink:href=javascript:window.alive=1>x</a></svg>",
    '"><iframe src=javascript:window.alive=1></iframe>',
    "</pre></textarea><details open ontoggle=window.alive=1>",
    "'-window.alive=1-' ${window.alive=1} {{window.alive=1}}",
    "&lt;script&gt;window.alive=1&lt;/script&gt; &#60;b&#62;",
    "javascript:window.alive=1",
    "\u202e<math><mtext><style><img src onerror=window.alive=1>\x1b[31m\x00",
]


def test_the_chart_library_is_the_release_that_its_licence_belongs_to():
    # uPlot 1.6.32, dist/uPlot.iife.min.js of its package in the npm registry
    assert (
        hashlib.sha256((PAGE / "uplot.js").read_bytes()).hexdigest()
        == "19c8d4c6ad88929a79f4ae49d6f7161566dfd0ba3d15cc495e974f787eb78f1f"
    )
    assert "MIT" in (PAGE / "uplot.LICENSE.txt").read_text(encoding="utf-8")


def test_the_page_makes_no_tag_from_text_and_loads_nothing_from_elsewhere():
    assert len(OURS) > 5
    making = re.compile(
        r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function|createContextual"
    )
    for path in (*OURS, PAGE / "index.html", PAGE / "style.css", PAGE / "uplot.css"):
        text = path.read_text(encoding="utf-8")
        assert not making.search(text) and not re.search(r"https?://|url\(|@import", text), path.name
    index = (PAGE / "index.html").read_text(encoding="utf-8")
    assert not re.search(r"<script(?![^>]*\bsrc=)|<style|\sstyle=|\son[a-z]+=", index)
    named = set(re.findall(r'(?:src|href)="/page/([^"]+)"', index))
    for path in OURS:
        named |= set(re.findall(r'from "\./([^"]+)"', path.read_text(encoding="utf-8")))
    assert named and named == {path.name for path in PAGE.iterdir()} - {"index.html", "uplot.LICENSE.txt"}


# Two own turns of two and three tokens, a tool between them whose reading takes two; ends of turns are not trained.
TALK = {
    **{"key": "talk", "step": 3, "lane": 0, "agent": "qwen", "rollout": 0, "prompt_id": "p", "skill": "", "gold": "4"},
    **{"prompt": "2+2=", "prompt_seen": None, "text": "so 4", "reward": 1.0, "verdict": "correct", "stop": "eos"},
    **{
        "num_tokens": 7,
        "advantage": {"qwen": 1.0},
        "ratio": {"qwen": 1.1},
        "others": [],
        "extracted": "",
        "rule": "the text has no answer",
    },
    "turns": [
        {"role": "assistant", "content": "2+2?", "text": "2+2?", "opened": "<think>", "num_tokens": 2},
        {"role": "tool", "name": "sum", "content": "[4]", "text": "[4]", "num_tokens": 2},
        {"role": "assistant", "content": "so 4", "text": "so 4", "num_tokens": 3, "stop": "eos"},
    ],
    **{"tokens": ["2+2?", "<end>", "[4]", "<open>", "so ", "4", "<end>"], "trained_places": [0, 4, 5]},
    **{"token_ratio": [2.0, 1.0, 0.5], "token_logprob": [-0.1, -4.0, -0.4]},
}


class Routes:
    """Two runs of 40 steps, the second with one answer to each prompt for every hostile text, as the server tells them.

    upto         the last step that runs have reached; `grow` raises it and answers the polls that wait
    told_steps   the steps that the list of metrics speaks of
    """

    def __init__(self) -> None:
        self.upto, self.seq, self.polls = 40, 0, []
        self.told_steps = 40

    def runs(self) -> list[dict[str, Any]]:
        of_all = {"steps": self.upto, "last_step": self.upto, "num_steps": 40, "agents": ["llama", "qwen"]}
        names = ("calm", HOSTILE[1])
        return [
            of_all | {"id": f"r{n}", "name": name, "path": name, "state": "running", "seed": n, "note": HOSTILE[0]}
            for n, name in enumerate(names)
        ]

    def metrics(self, run: str, query: dict[str, str]) -> dict[str, Any]:
        events = [{"step": 7, "kind": "alarm", "text": HOSTILE[2]}, {"step": 0, "kind": "start", "text": "start"}]
        pair = [f"agent/llama/from/qwen/{part}" for part in ("below", "inside", "above")]
        of_pair = [*pair, *(f"agent/llama/from/qwen/view/num_{part}" for part in ("answers", "trained"))]
        every = [
            f"agent/{a}/{n}"
            for a in ("llama", "qwen")
            for n in ("accuracy", "reward_mean", "logprob_mean", "own/thing")
        ]
        if "names" not in query:
            return {"names": [*every, *of_pair], "groups": {}, "events": events, "last_step": self.told_steps}
        each = int(query.get("every", 1))
        steps = [step for step in STEPS if int(query.get("after", 0)) < step <= self.upto and step % each == 0]
        names = query["names"].split(",")
        series = {name: [self.value(run, name, step) for step in steps] for name in names}
        bounds = {
            name: {"low": [v - 0.1 for v in series[name]], "high": [v + 0.1 for v in series[name]]}
            for name in names
            if name.endswith("/accuracy")
        }
        more = {"seconds": [10.0 * step for step in steps], "trained_answers": [64 * step for step in steps]}
        return {"names": names, "steps": steps, "series": series, "intervals": bounds, "events": events} | more

    @staticmethod
    def value(run: str, name: str, step: int) -> float:
        if name.split("/")[-1] in ("below", "inside", "above"):
            return 1 / 3
        return step / 100 + (0.5 if run == "r1" else 0.0) + (0.1 if "qwen" in name else 0.0)

    def answers(self) -> dict[str, dict[str, Any]]:
        """By key, in full."""
        tokens = {"token_ratio": [1.0, 2.0, 0.5], "token_logprob": [-0.1, -1.0, -4.0]}
        found = {}
        for n, text in enumerate(HOSTILE):
            for agent in ("llama", "qwen"):
                key = f"3.0.{n}.{agent}.0"
                found[key] = {
                    "key": key, "step": 3, "lane": 0, "agent": agent, "rollout": 0, "prompt_id": text, "skill": text,
                    "gold": text, "prompt": [{"role": text, "content": text}], "prompt_seen": text, "text": text,
                    "reward": n % 2, "verdict": text, "stop": text, "turn": None, "num_tokens": 3, "length": 3,
                    "advantage": {text: 1.0, agent: -1.0}, "ratio": {agent: 1.25}, "not_trained": {text: text},
                    "tokens": [text, text, " "], **tokens, "extracted": text, "rule": text,
                    "excerpt": text if n else " \n",
                }  # fmt: skip
        for one in found.values():
            rivals = [other for other in found.values() if other["prompt_id"] == one["prompt_id"] and other is not one]
            one["others"] = [{name: value for name, value in other.items() if name != "others"} for other in rivals]
        return found

    def answer(self, path: str, query: dict[str, str]) -> Any:
        """The table of a route; None for one that there is not."""
        parts = path.strip("/").split("/")
        match parts[1:]:
            case ["catalogue"]:
                return catalogue()
            case ["runs"]:
                return self.runs()
            case ["events"]:
                return {"seq": self.seq, "changed": ["r0", "r1", "s2"] if int(query["after"]) < self.seq else []}
            case ["compare"]:
                change = {"key": HOSTILE[0], "values": {"r0": HOSTILE[1], "r1": 2}}
                return {"differences": [change], "groups": [{"name": HOSTILE[3], "runs": ["r0", "r1"]}]}
            case ["runs", run, "metrics"]:
                return self.metrics(run, query)
            case ["runs", _, "verdicts"]:
                verdict = {"chart": "fates", "text": HOSTILE[1], "level": "good", "learner": "llama", "source": "qwen"}
                fates = {"steps": STEPS, "series": {"reached": [3] * 40, HOSTILE[4]: [1] * 40}}
                return {"verdicts": [verdict], "fates": [{"learner": "llama", "source": "qwen", **fates}]}
            case ["runs", _, "job"]:
                rank = {"rank": 0, "agent": HOSTILE[0], "lane": 0, "cell": 0, "node": HOSTILE[1], "phase": HOSTILE[2]}
                rank |= {"when": HOSTILE[1], "phase_s": 4.0, "num_done": 3, "num_before": 4, "progress": 0.75}
                waits = rank | {
                    "rank": 1,
                    "phase": "exchange",
                    "waits_for": HOSTILE[0],
                    "waited_s": 65.0,
                    "num_done": 0,
                }
                silent = rank | {"rank": 2, "silent": True, "seen_s_ago": 90.0}
                told = {"state": "running", "step": 3, "num_steps": 40, "trouble": [{"text": HOSTILE[0]}]}
                return told | {"ranks": [rank, waits, silent], "waited_for": [0, 2]}
            case ["runs", _, "answers"]:
                wanted = json.loads(query["filter"])
                rows = [row for row in self.answers().values() if wanted.get("agent") in (None, row["agent"])]
                choices = {"agent": ["llama", "qwen"], "skill": HOSTILE, "verdict": HOSTILE, "stop": []}
                return {
                    "total": len(rows),
                    "page": 0,
                    "per_page": 50,
                    "rows": rows,
                    "choices": choices,
                    "note": HOSTILE[0],
                }
            case ["runs", _, "answers", "talk"]:
                return TALK
            case ["runs", _, "answers", key]:
                return self.answers().get(key)
            case ["studies"]:
                kinds = ("experiment", "bench", "eval")
                return [{"id": f"s{n}", "kind": kind, "name": HOSTILE[n], "path": HOSTILE[n], "note": HOSTILE[2]}
                        for n, kind in enumerate(kinds)]  # fmt: skip
            case ["studies", "s0"]:
                line = {"x": {"steps": [0, 10]}, "y": [0.25, 0.5 + (query.get("reference") == "b")]}
                lines = [line | {"label": f"{name}, 2 seeds", "low": [0.2, 0.4], "high": [0.3, 0.6]} for name in "ab"]
                charts = [{"title": HOSTILE[0], "note": HOSTILE[1], "lines": lines}]
                cells = [[HOSTILE[0], HOSTILE[1]]]
                tables = [{"title": HOSTILE[0], "head": [HOSTILE[1], HOSTILE[0]], "rows": cells, "notes": [HOSTILE[2]]}]
                about = {"facts": {HOSTILE[0]: HOSTILE[1]}, "notes": [HOSTILE[2]], "methods": ["a", "b"]}
                return about | {"reference": query.get("reference", "a"), "charts": charts, "tables": tables}
            case ["studies", "s2"]:
                return {"facts": {}, "benchmarks": [HOSTILE[0]], "tables": []}
            case ["studies", "s2", "answers"]:
                row = {"id": HOSTILE[0], "rollout": 0, "gold": HOSTILE[1], "vote": HOSTILE[2], "stop": HOSTILE[3]}
                row |= {"prompt_seen": HOSTILE[4], "text": HOSTILE[5], "verdict": HOSTILE[0], "reward": 0.0}
                rows = [row | {"num_tokens": 3}] * (1 if query.get("text") else 2)
                page = int(query.get("page", 0))
                total = len(rows) if query.get("text") else 60
                return {"total": total, "page": page, "per_page": 20, "rows": rows, "verdicts": HOSTILE}
            case ["studies", "s1"]:
                parts = [["learn", 1.0, "#112233"], [HOSTILE[0], 0.5, HOSTILE[1]]]
                rows = [{"label": HOSTILE[2], "whole": whole, "parts": parts} for whole in (2.0, 4.0)]
                bars = [{"title": HOSTILE[0], "note": HOSTILE[1], "unit": "s", "rows": rows}]
                return {"facts": {}, "bars": bars, "tables": []}
        return None

    def serve(self, route: Any) -> None:
        url = urlparse(route.request.url)
        headers = {"Content-Security-Policy": POLICY, "X-Content-Type-Options": "nosniff"}
        if not url.path.startswith("/api/"):
            file = PAGE / (url.path.removeprefix("/page/") if url.path != "/" else "index.html")
            return route.fulfill(status=200, headers=headers, content_type=TYPES[file.suffix], body=file.read_bytes())
        if url.path == "/api/events" and int(parse_qs(url.query)["after"][0]) >= self.seq:
            return self.polls.append(route)
        table = self.answer(url.path, {name: values[0] for name, values in parse_qs(url.query).items()})
        body = json.dumps(table if table is not None else {"error": f"no such thing: {HOSTILE[0]}"})
        return route.fulfill(
            status=200 if table is not None else 404, headers=headers, content_type="application/json", body=body
        )

    def grow(self, upto: int) -> None:
        self.upto, self.seq = upto, self.seq + 1
        polls, self.polls = self.polls, []
        for route in polls:
            self.serve(route)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    drive = pytest.importorskip("playwright.sync_api", reason="playwright is not installed (extra: browser)")
    if CHROMIUM is None:
        pytest.skip("no Chromium on this machine")
    with drive.sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=CHROMIUM)
        yield chromium
        chromium.close()


class Visit:
    """A page of the browser with its routes; no error may have been told when it is left."""

    def __init__(self, browser: Any, width: int = 1400, scheme: str = "light") -> None:
        self.routes, self.problems = Routes(), []
        self.page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
        self.page.set_default_timeout(20_000)
        self.page.on("console", lambda said: said.type == "error" and self.problems.append(said.text))
        self.page.on("pageerror", lambda error: self.problems.append(str(error)))
        self.page.route("**/*", self.routes.serve)

    def __enter__(self) -> "Visit":
        return self

    def __exit__(self, *error: object) -> None:
        self.page.close()
        assert error[0] is not None or not self.problems, self.problems

    def open(self, place: str = "") -> Any:
        self.page.goto(f"{HOST}/?token=secret{place}")
        return self.page

    def require_dead(self) -> None:
        """No text of a run became a tag."""
        assert self.page.evaluate("window.alive === undefined")
        assert self.page.locator("img, iframe, svg, math, body style, #main script, object, embed").count() == 0


def chart(page: Any, title: str) -> Any:
    return page.locator(".chart").filter(has=page.get_by_role("heading", name=title)).first


def test_curves_grow_zoom_and_tell_values(browser):
    with Visit(browser) as visit:
        visit.routes.upto = 20
        page = visit.open()
        reward = chart(page, "Reward while training")
        reward.get_by_text("last: step 20").wait_for()
        assert "token" not in page.url
        assert "llama0.200" in reward.locator(".legend").inner_text().replace(" ", "").replace("\n", "")
        assert "0.100 to 0.300" in chart(page, "Held-out accuracy").inner_text()
        plot = reward.locator(".plot")
        assert "Reward while training. llama: 0.010 at step 1, 0.200 at 20" in plot.get_attribute("aria-label")
        plot.focus()
        page.keyboard.press("ArrowLeft")
        reward.get_by_text("step 19").wait_for()
        page.keyboard.press("+")
        page.wait_for_url(re.compile(r"from=.*to="))
        page.keyboard.press("0")
        page.wait_for_url(re.compile(r"^[^=]*$"))
        place = plot.bounding_box()
        page.mouse.move(place["x"] + 120, place["y"] + 60)
        page.mouse.down()
        page.mouse.move(place["x"] + 220, place["y"] + 70, steps=3)
        page.mouse.up()
        page.wait_for_url(re.compile(r"from="))
        page.get_by_role("button", name="all", exact=True).click()
        page.get_by_label("x axis").select_option("trained_answers")
        page.mouse.move(0, 0)
        reward.get_by_text("trained answers 1,280").wait_for()


@pytest.mark.nightly
def test_a_long_run_is_drawn_by_every_tenth_step_and_then_whole(browser):
    with Visit(browser) as visit:
        visit.routes.told_steps = 2_500
        reward = chart(visit.open(), "Reward while training")
        reward.get_by_text("last: step 40").wait_for()
        plot = reward.locator(".plot")
        assert "llama: 0.100 at step 10, 0.400 at 40" in plot.get_attribute("aria-label")
        reward.locator('.plot[aria-label*="llama: 0.010 at step 1, 0.400 at 40"]').wait_for()


def test_new_rows_appear_without_a_reload(browser):
    with Visit(browser) as visit:
        visit.routes.upto = 20
        page = visit.open()
        reward = chart(page, "Reward while training")
        reward.get_by_text("last: step 20").wait_for()
        visit.routes.grow(21)
        reward.get_by_text("last: step 21").wait_for()
        assert "0.210" in reward.locator(".legend").inner_text()
        visit.routes.grow(33)
        reward.get_by_text("last: step 33").wait_for()
        assert "33 of 40 steps" in page.inner_text("#runs")


def test_runs_lie_over_each_other_and_seeds_become_a_mean(browser):
    with Visit(browser, scheme="dark") as visit:
        page = visit.open("#/curves?runs=r0,r1")
        reward = chart(page, "Reward while training")
        reward.get_by_text("last: step 40").wait_for()
        assert reward.locator(".legend button").count() == 4
        page.get_by_text("1 setting differs").click()
        (cells,) = [row.locator("td").all_inner_texts() for row in page.locator("details .compare tbody tr").all()]
        assert cells == [HOSTILE[1], "2"]
        page.get_by_label("seeds").select_option("mean")
        legend = reward.locator(".legend")
        legend.get_by_text("mean of 2 seeds").first.wait_for()
        assert "0.650" in legend.inner_text() and "0.400 to 0.900" in legend.inner_text()  # of .4 and .9 at step 40
        page.goto(f"{HOST}/#/compare?runs=r0,r1")
        page.get_by_role("heading", name="Last values").wait_for()
        assert "+0.500" in page.inner_text("main")
        assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(23, 26, 31)"
        visit.require_dead()


@pytest.mark.nightly
@pytest.mark.parametrize("width", [400, 1600])
def test_answers_are_found_and_hostile_text_stays_text(browser, width):
    with Visit(browser, width) as visit:
        page = visit.open("#/answers?runs=r1")
        page.locator("tbody tr").first.wait_for()
        assert page.locator("tbody tr").count() == 2 * len(HOSTILE)
        page.get_by_label("agent").select_option("qwen")
        page.get_by_text(f"{len(HOSTILE)} answers").wait_for()
        visit.require_dead()
        for n in range(len(HOSTILE)):
            page.goto(f"{HOST}/#/answers?runs=r1&key=3.0.{n}.qwen.0")
            page.locator(".answer.chosen .strip").wait_for()
            assert page.locator(".column").count() == 2
            page.get_by_label("colour tokens by").select_option("logprob")
            assert page.locator(".answer.chosen .strip span.down5").inner_text() == " "
            page.locator(".answer.chosen").get_by_text("numbers of each token").click()
            visit.require_dead()
        for view in ("job", "curves", "results", "results?study=s1", "compare?runs=r0,r1"):
            page.goto(f"{HOST}/#/{view}")
            page.locator("main h2").first.wait_for()
            page.wait_for_timeout(300)
            visit.require_dead()
            assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), view


def test_a_cleared_filter_leaves_its_fields_and_answers_have_a_run(browser):
    with Visit(browser, 400) as visit:
        page = visit.open("#/answers?runs=r0,r1&agent=qwen&text=x")
        page.get_by_text(f"{len(HOSTILE)} answers").wait_for()
        assert page.locator("main h1").inner_text() == "Answers of calm the first of 2 chosen runs"
        assert page.locator(".excerpt a").first.inner_text() == "(blank)"
        beside = page.evaluate("getComputedStyle(document.querySelector('td.reward'), '::before').content")
        assert "reward" in beside or "data-name" in beside, "numbers of a narrow list have their names"
        page.get_by_role("button", name="clear", exact=True).click()
        page.get_by_text(f"{2 * len(HOSTILE)} answers").wait_for()
        assert (page.get_by_label("text", exact=True).input_value(), page.get_by_label("agent").input_value()) == (
            "",
            "",
        )
        assert page.evaluate("document.activeElement.textContent") == "clear"


def test_numbers_keep_their_digits_and_units_and_metrics_are_found(browser):
    with Visit(browser) as visit:
        page = visit.open("#/curves?find=entropy")
        page.get_by_role("heading", name="Log-prob of own answers (nats a token)").wait_for()
        assert page.locator(".card").all_inner_texts().count("") == page.locator(".card").count() - 1
        page.get_by_label("find a metric").fill("nonsense")
        page.get_by_text("No metric of this name.").wait_for()
        small, rates, late, read = page.evaluate(
            """async () => {
              const { show } = await import("/page/dom.js");
              const { Chart, ticks } = await import("/page/chart.js");
              const chart = new Chart("title", { from: null, to: null });
              document.body.append(chart.node);
              const x = Array.from({ length: 20000 }, (_, n) => n);
              const line = (label, y) => ({ label, colour: "#112233", dash: 0, x, y });
              chart.draw({ xUnit: "step", lines: [line("a", x), line("b", x.map((n) => (n * 37) % 101))] });
              await new Promise(requestAnimationFrame);
              const read = Array.from({ length: 9 }, () => {
                chart.canvas.dispatchEvent(new KeyboardEvent("keydown", { key: "ArrowLeft" }));
                return [chart.at.textContent, `step ${chart.legend.querySelector("output").textContent}`];
              });
              return [[0.0015, -0.0024, 0.5].map(show), ticks([3.9e-6, 4e-6]), ticks([99990, 99992]), read];
            }"""
        )
        assert (small, rates) == (["0.0015", "-0.0024", "0.500"], ["3.9e-6", "4e-6"]) and late == ["99.99k", "99.992k"]
        assert all(step == value for step, value in read) and len(set(map(tuple, read))) == 9


def test_the_map_of_ranks_says_who_waits_for_whom(browser):
    with Visit(browser) as visit:
        page = visit.open("#/job")
        page.locator(".cell li").first.wait_for()
        said = page.locator(".waiting").inner_text()
        assert said.startswith("1 of 3 ranks wait for others. At work: rank 0 (") and "rank 2 (" in said
        works, waits, silent = page.locator(".cell li").all_inner_texts()
        assert "4 s" in works and "3 of about 4" in works and "waits" not in works
        assert f"waits 1 min 5 s for {visible(HOSTILE[0])}" in waits and "stale since 1 min 30 s" in silent
        assert page.locator(".cell progress").first.get_attribute("value") == "0.75"
        visit.require_dead()


def test_results_are_compared_with_a_method_of_the_readers(browser):
    with Visit(browser) as visit:
        page = visit.open("#/results")
        shown = page.locator(".chart .legend")
        shown.get_by_text("b, 2 seeds").wait_for()
        assert "0.500 0.400 to 0.600" in shown.inner_text() and page.locator("table.results td").count() == 1
        page.get_by_label("compare with").select_option("b")
        shown.get_by_text("1.500").first.wait_for()
        page.get_by_label("methods with").fill("b,")
        page.get_by_label("methods with").press("Enter")
        page.wait_for_url(re.compile("methods="))
        shown.locator("button").nth(1).wait_for(state="detached")
        page.get_by_label("folder").select_option("s2")
        page.locator(".answer").nth(1).wait_for()
        assert page.locator(".answer pre").first.inner_text() == HOSTILE[5]
        visit.require_dead()
        page.get_by_role("button", name="next").click()
        page.get_by_text("60 answers, page 2 of 3").wait_for()
        page.get_by_label("verdict").select_option(HOSTILE[0])
        page.get_by_role("button", name="next").click()
        page.get_by_text("60 answers, page 2 of 3").wait_for()
        with page.expect_response(re.compile("page=1")):
            visit.routes.grow(20)  # new answers
        page.wait_for_timeout(300)
        assert page.get_by_text("60 answers, page 2 of 3").is_visible()
        assert page.get_by_label("verdict").input_value() == HOSTILE[0]
        page.get_by_label("text", exact=True).fill("x")
        page.locator(".answer").nth(1).wait_for(state="detached")
        page.get_by_label("folder").select_option("s1")
        page.locator(".bar").nth(1).wait_for()
        wide = [page.locator(".bar").nth(n).bounding_box()["width"] for n in range(2)]
        parts = [page.locator(".bar").nth(1).locator("i").nth(n).bounding_box()["width"] for n in range(2)]
        assert math.isclose(wide[0] * 2, wide[1], rel_tol=0.01) and math.isclose(parts[0], wide[1] / 4, rel_tol=0.02)
        assert math.isclose(parts[1], wide[1] / 8, rel_tol=0.02)
        visit.require_dead()


def test_own_turns_of_a_conversation_are_coloured_by_token(browser):
    with Visit(browser) as visit:
        page = visit.open("#/answers?runs=r1&key=talk")
        page.locator(".answer.chosen .strip").first.wait_for()

        def shades() -> list[tuple[str, str]]:
            spans = page.locator(".answer.chosen .message .strip span")
            return [(span.inner_text(), span.get_attribute("class")) for span in spans.all()]

        assert "\njudged by the text has no answer" in page.locator(".answer.chosen").inner_text()
        said = ["2+2?", "<end>", "so ", "4", "<end>"]
        assert shades() == [*zip(said, ["up5", "none", "same", "down5", "none"], strict=True)]
        assert page.locator(".answer.chosen .message pre").all_inner_texts() == ["<think>", "[4]"]
        page.get_by_label("colour tokens by").select_option("logprob")
        assert shades() == [*zip(said, ["down1", "none", "down5", "down1", "none"], strict=True)]
        page.get_by_label("colour tokens by").select_option("advantage")
        assert shades() == [*zip(said, ["up3", "none", "up3", "up3", "none"], strict=True)]
        page.locator(".answer.chosen").get_by_text("numbers of each token").click()
        assert page.locator(".answer.chosen tbody tr").nth(4).inner_text().split() == ['"so', '"', "-4", "1"]
        page.get_by_label("colour tokens by").select_option("none")
        assert page.locator(".answer.chosen .message pre").all_inner_texts() == ["<think>", "2+2?", "[4]", "so 4"]


def test_arithmetic_of_series(browser):
    with Visit(browser) as visit:
        page = visit.open()
        smooth, mean, binned, shades, thinned = page.evaluate(
            """async () => {
              const { smooth, meanOfSeeds, bin, thin } = await import("/page/series.js");
              const { shade } = await import("/page/answer.js");
              return [
                smooth([1, null, 3, 2], 0.5),
                meanOfSeeds([{ x: [1, 2, 3], y: [1, 2, 9] }, { x: [1, 2], y: [3, 6] }]),
                bin([1, 2, 3, 4, 5], [[1, 3, 5, 7, 9]], 3),
                [1, Math.exp(0.5), Math.exp(-0.1), 0, null].map((ratio) => shade("ratio", ratio)),
                [[null, null], [2000, 2100], [2000, 3000]].map(([from, to]) => {
                  const x = Array.from({ length: 10000 }, (_, n) => n + 1);
                  const y = x.map((n) => (n === 5000 ? 9 : n === 2500 ? null : n === 7777 ? -9 : Math.sin(n)));
                  return thin({ x, y, low: y, high: null }, from, to, 600);
                }),
              ];
            }"""
        )
    weights, values = (0.5, 1.0), (1.0, 3.0)  # of the newest value twice that of the one before
    assert smooth[:2] == [1.0, None]
    assert math.isclose(smooth[2], sum(w * v for w, v in zip(weights, values)) / sum(weights))
    assert mean == {"x": [1, 2], "y": [2, 4], "low": [1, 2], "high": [3, 6]}
    assert binned == {"x": [1, 3, 5], "layers": [[2, 6, 9]], "width": 2}
    assert shades == [0, 5, -1, -5, None]
    whole, near, part = thinned
    assert len(near["x"]) == 10_000, "few points are all kept"
    for line, ends in ((whole, (1, 10_000)), (part, (1999, 3001))):
        assert 300 < len(line["x"]) <= 602 and (line["x"][0], line["x"][-1]) == ends
        assert line["x"] == sorted(set(line["x"])) and line["low"] == line["y"] and line["high"] is None
        assert all(y in (9, -9) or math.isclose(y, math.sin(x), abs_tol=1e-12) for x, y in zip(line["x"], line["y"]))
    assert {9, -9} <= set(whole["y"]) and 2500 not in part["x"]
