"""213 hostile texts in every place where `hacpo-mega watch` shows text: data to the server, letters to the browser."""

import json
import re
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from hostile_texts import CONTEXTS, HOSTILE, PATTERNS
from repository import ROOT
from starlette.testclient import TestClient
from starlette.types import ASGIApp
from watched_run import AGENTS, WatchedRun

from hacpo_mega.evaluation.answers import Answer, AnswerFile
from hacpo_mega.logbook.evaluation_file import BenchmarkResult, Estimate, Evaluation, write_evaluation
from hacpo_mega.models.files.visible import visible
from hacpo_mega.watch import views_of
from hacpo_mega.watch.answers import Judges
from hacpo_mega.watch.runs import Runs
from hacpo_mega.watch.server import HEADERS, listen, make_app

PAGE = ROOT / "hacpo_mega" / "watch" / "page"
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
FOLDERS = tuple(dict.fromkeys(text.replace("/", "\u2215").replace("\0", "") for text in HOSTILE))  # as names of folders
TOKEN = "t0ken"


def config(texts: tuple[str, ...]) -> str:
    """A configuration whose names, keys and values are hostile; JSON's strings are TOML's."""
    tables = "".join(f"[[agents]]\nname = {json.dumps(text)}\n" for text in (*AGENTS, *HOSTILE))
    settings = "".join(f"{json.dumps(key)} = {json.dumps(text)}\n" for key, text in zip(HOSTILE, texts))
    return f'num_steps = 3\nseed = 1\n{tables}[reward]\nkind = "exact"\n[made]\n{settings}'.replace("\x7f", "\\u007f")


def write_hostile(folder: Path, texts: tuple[str, ...]) -> None:
    """A run of one step in which every word that a run can choose is a hostile text."""
    run = WatchedRun(folder)
    (folder / "config.toml").write_text(config(texts), encoding="utf-8")
    line = json.loads(run.metrics_line(1))
    for text in HOSTILE:
        line["values"] |= {f"agent/{text}/reward_mean": 0.5, f"agent/qwen/own/{text}": 1.0}
        line["values"] |= {f"omega/{text}/llama": 1.0, f"agent/qwen/from/llama/view/num_{text}": 1.0}
        line["timing"] |= {f"agent/qwen/phase_mean/{text}_s": 1.0}
    (folder / "metrics.jsonl").write_text(json.dumps(line) + "\n")
    alarms = [{"time_unix_s": 4e9, "step": 1, "text": text} for text in HOSTILE]
    (folder / "alarms.jsonl").write_text("".join(json.dumps(alarm) + "\n" for alarm in alarms))
    prompts = []
    for number in range(len(CONTEXTS)):
        own = HOSTILE[number * len(PATTERNS) : (number + 1) * len(PATTERNS)]
        messages = json.dumps([{"role": "user", "content": text} for text in own])
        answers = [
            {"agent": text, "rollout": 0, "text": text, "reward": 0.0, "verdict": text, "stop": text, "num_tokens": 1}
            | {"mean_logprob": -0.5, "advantage": {text: 1.0}, "ratio": {text: 1.0}, "not_trained": {text: text}}
            | ({"tokens": [text], "token_logprob": [-1.0], "token_ratio": [1.0]} if place % 2 else {})
            | (
                {"turns": [{"role": text, "content": text, "name": text}], "task": text, "opening": text}
                if place % 3
                else {}
            )
            for place, text in enumerate(own)
        ]
        prompts.append(
            {"step": 1, "lane": 0, "prompt_index": number, "id": own[0], "gold": own[0], "skill": own[1]}
            | {"prompt": messages, "prompt_seen": {text: text for text in own}, "answers": answers}
        )
    part = folder / "rollouts" / "step_000001.lane_0000.jsonl"
    part.write_text("".join(json.dumps(prompt) + "\n" for prompt in prompts))


def write_hostile_studies(folder: Path) -> None:
    """An experiment, a benchmark and two evaluations in which every word is a hostile text."""
    points: dict[str, Any] = {"steps": [0, 1], "seconds": [0.0, 1.0], "agents": [HOSTILE[0]], "commit": HOSTILE[1]}
    counts = {HOSTILE[0]: [0, 1]}
    curves = {
        "accuracy": {HOSTILE[0]: [0.5, 0.6]},
        "accuracy_by_skill": {HOSTILE[0]: {text: [0.5, 0.6] for text in HOSTILE}},
    }
    curves |= dict.fromkeys(("generated_answers", "trained_answers", "updates"), counts)
    run = points | {"regime": HOSTILE[2], "stage": "reported", "learning_rate": 0.1, "seed": 1, "curves": curves}
    run |= {"versions": {HOSTILE[0]: HOSTILE[1]}, "machine": {"cpu": HOSTILE[2], "cores": 1}, "config_file": HOSTILE[0]}
    identity = {"config": HOSTILE[0], "held_out": HOSTILE[1], "models": {HOSTILE[0]: HOSTILE[2]}}
    run |= {"overrides": HOSTILE, "identity": identity, "diagnosis": {"steps_per_window": 1, "values": {}}}
    (folder / "grid").mkdir(parents=True)
    lines = (json.dumps(run | {"method": text}) + "\n" for text in HOSTILE)
    (folder / "grid" / "runs.jsonl").write_text("".join(lines))
    rates = {"generated_per_s": 1.0, "trained_per_s": 1.0, "idle_share": 0.5, "seconds_per_1000": 1.0}
    agent = rates | {"trained_answers": 1.0, "phases_s": {HOSTILE[0]: 1.0}, "flops_per_s": {HOSTILE[1]: 1.0}}
    schedule = {"wall_s": 1.0, "p50_s": 1.0, "p95_s": 1.0, "by_round_s": [1.0], "together": None}
    schedules = [schedule | {"name": text, "agents": {text: agent}} for text in HOSTILE]
    (folder / "times").mkdir()
    (folder / "times" / "bench.json").write_text(json.dumps({"facts": {t: t for t in HOSTILE}, "schedules": schedules}))
    score = Estimate(0.5, 0.4, 0.6)
    results = [
        BenchmarkResult(*(text, text, {text: score}, 1, 1, 0, 1, 1), no_answer=0.0, cut=0.0, tokens_mean=1.0)
        for text in ("maths", *HOSTILE)
    ]
    for name, text in (("one", HOSTILE[0]), ("two", HOSTILE[1])):
        out = folder / "evaluations" / name
        out.mkdir(parents=True)
        write_evaluation(Evaluation({"model": text, "reward": text}, tuple(results), score), out)
        file = AnswerFile(out, "maths", 0)
        file.append(Answer(text, n, n, *[text] * 3, text, text, 0.0, text, 1) for n, text in enumerate(HOSTILE))
        file.close()


@pytest.fixture(scope="module")
def served(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Runs, ASGIApp, Any]]:
    """Two hostile runs that differ in every setting, and runs whose folders have the names of the parameter."""
    folder = tmp_path_factory.mktemp("runs")
    write_hostile(folder / "one", HOSTILE)
    write_hostile(folder / "two", HOSTILE[1:] + HOSTILE[:1])
    write_hostile_studies(folder / "studies")
    for name in request.param:
        (folder / name).mkdir()
        (folder / name / "metrics.jsonl").touch()
    with pytest.MonkeyPatch.context() as patch, listen(0) as listener, Judges() as judges:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        runs = Runs([folder / "one", folder / "two", folder], print)
        for run in runs:
            while run.index.extend():
                pass
        yield runs, make_app(views_of(runs, judges), runs, TOKEN, listener.getsockname()[1]), listener


def test_there_are_213_of_them() -> None:
    assert (len(PATTERNS), len(CONTEXTS), len(set(HOSTILE)), len(FOLDERS)) == (71, 3, 213, 213)


@pytest.mark.nightly
@pytest.mark.parametrize("served", [FOLDERS], indirect=True)
def test_every_answer_of_the_server_holds_them_as_data(served: tuple[Runs, ASGIApp, Any]) -> None:
    runs, app, _ = served
    one, two = [run.id for run in runs][:2]
    client = TestClient(app, base_url="http://127.0.0.1:8123", headers={"Authorization": f"Bearer {TOKEN}"})

    def ask(path: str, status: int = 200, kind: str = "application/json", **query: Any) -> Any:
        found = client.get(path, params=query)
        assert (found.status_code, found.headers["content-type"]) == (status, kind), path
        assert {name: found.headers[name] for name in HEADERS} == HEADERS
        return found

    everything = set(HOSTILE)
    assert {run["name"] for run in ask("/api/runs").json()} == {run.folder.name for run in runs}
    found = ask("/api/compare", runs=f"{one},{two}").json()["differences"]
    assert {row["key"].removeprefix("made.") for row in found} >= everything
    assert {row["values"][run] for row in found for run in (one, two)} >= everything
    base = f"/api/runs/{one}"
    assert set(ask(f"{base}/metrics").json()["names"]) >= {f"agent/qwen/own/{text}" for text in HOSTILE}
    events = ask(f"{base}/metrics", names="agent/qwen/lr").json()["events"]
    assert {event["text"] for event in events} >= everything
    told = " ".join(one["text"] for one in ask(f"{base}/verdicts").json()["verdicts"])
    assert all(f"{text} is 1.00 times as capable as llama" in told for text in HOSTILE)
    assert {alarm["text"] for alarm in ask(f"{base}/job").json()["trouble"]} == {f"step 1: {t}" for t in HOSTILE[-5:]}
    rows = [row for page in range(5) for row in ask(f"{base}/answers", page=page).json()["rows"]]
    assert [{row[name] for row in rows} for name in ("agent", "verdict", "stop")] == [everything] * 3
    explained = ask(f"{base}/answers/1.0.0.{HOSTILE[0]}.0").json()
    assert {one["text"] for one in (explained, *explained["others"])} == set(HOSTILE[: len(PATTERNS)])
    assert (explained["extracted"], explained["explanation"]["gold"]) == (HOSTILE[0], HOSTILE[0])
    lines = ask(f"{base}/export", kind="application/x-ndjson").content.split(b"\n")[:-1]
    assert {json.loads(line)["text"] for line in lines} == everything
    for study in ask("/api/studies").json():
        kind, found = study["kind"], ask(f"/api/studies/{study['id']}").json()
        assert everything <= set(found.get("methods", ())) | set(found["facts"]) | set(found.get("benchmarks", ())) | {
            text for table in found["tables"] for text in table["head"]
        }, kind
        if kind == "eval":
            pages = (
                ask(f"/api/studies/{study['id']}/answers", benchmark="maths", page=page).json() for page in range(11)
            )
            assert {
                row[name] for page in pages for row in page["rows"] for name in ("text", "gold", "id")
            } == everything
    for place, text in enumerate(HOSTILE[::2]):
        query = ({"filter": text}, {"filter": json.dumps({text: 1})}, {"sort": text})[place % 3]
        assert "\n" not in ask(f"{base}/answers", 400, **query).json()["error"]
    assert not {text for text in HOSTILE if text in ask("/", kind="text/html; charset=utf-8").text} - {"null"}


@pytest.fixture(scope="module")
def address(served: tuple[Runs, ASGIApp, Any]) -> Iterator[str]:
    """Where the server listens, for a real browser."""
    _, app, listener = served
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning", lifespan="off", timeout_graceful_shutdown=1))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    server.should_exit = True
    thread.join(10.0)


LIVE = """() => {
  const nodes = [...document.querySelectorAll("*")];
  const found = nodes.flatMap((node) => [...node.attributes].map(({ name, value }) => [node.localName, name, value]));
  const acts = (name) => name.startsWith("on") || ["srcdoc", "srcset", "action", "formaction"].includes(name);
  const leads = (name, value) => ["href", "src"].includes(name) && !/^(#|\\/(?!\\/))/.test(value);
  return {
    alive: window.alive ?? null,
    tags: [...new Set(nodes.map(({ localName }) => localName))],
    handlers: found.filter(([, name]) => acts(name)),
    links: found.filter(([, name, value]) => leads(name, value)),
    styles: found.filter(([, name, value]) => name === "style" && /url|expression|import/i.test(value)),
  };
}"""


@pytest.mark.nightly
@pytest.mark.parametrize("served", [FOLDERS], indirect=True)
def test_no_text_lives_in_a_browser(served: tuple[Runs, ASGIApp, Any], address: str) -> None:
    drive = pytest.importorskip("playwright.sync_api", reason="playwright is not installed (extra: browser)")
    if CHROMIUM is None:
        pytest.skip("no Chromium on this machine")
    one, two = [run.id for run in served[0]][:2]
    ours = " ".join(path.read_text(encoding="utf-8") for path in (*PAGE.glob("[!u]*.js"), PAGE / "index.html"))
    tags = {*re.findall(r'el\(\s*"([a-z1-9]+)"', ours), *re.findall(r"<([a-z]+)[ >]", ours), "canvas"}
    assert not tags & {"img", "iframe", "svg", "style", "video", "object", "embed", "base", "template", "math"}
    ranks = [
        {"rank": n, "agent": text, "lane": text, "cell": text, "node": text, "phase": text}
        for n, text in enumerate(HOSTILE)
    ]
    job = {"state": HOSTILE[0], "step": 1, "num_steps": 3, "ranks": ranks, "trouble": [{"text": t} for t in HOSTILE]}
    with drive.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM)
        page, problems = browser.new_page(viewport={"width": 1600, "height": 25_000}), []
        page.set_default_timeout(60_000)
        refused = "with a status of 400"  # what Chromium itself says of it
        page.on(
            "console", lambda said: said.type == "error" and refused not in said.text and problems.append(said.text)
        )
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("dialog", lambda dialog: (problems.append(f"dialog {dialog.message}"), dialog.dismiss()))
        page.on("request", lambda asked: asked.url.startswith(f"{address}/") or problems.append(asked.url))
        page.route("**/job", lambda route: route.fulfill(json=job, headers=HEADERS))  # a map of more ranks than texts

        def look(place: str, ready: str, texts: tuple[str, ...]) -> None:
            """Opens a view; all the texts are there to be read, and nothing of them lives."""
            page.goto(f"{address}/?token={TOKEN}{place}")
            page.locator(ready).first.wait_for()
            page.wait_for_timeout(300)
            found = page.evaluate(LIVE)
            assert not set(found.pop("tags")) - tags
            assert found == {"alive": None, "handlers": [], "links": [], "styles": []}
            shown = page.evaluate("document.body.textContent")
            assert [text for text in texts if visible(text) not in shown] == [], place
            assert not re.search("[\u202e\u2066\x00\x1b\x07\x7f\u2028]", shown)
            assert not problems, problems

        look(f"#/compare?runs={one},{two}", "table.compare", HOSTILE + FOLDERS)
        look("#/job", ".trouble li", HOSTILE)
        look(f"#/curves?runs={one}", ".events summary", HOSTILE)
        page.get_by_label("find a metric").fill("/own/")
        cards = page.locator(".section[open] .card:not([hidden])")
        cards.nth(len(HOSTILE) - 1).wait_for()
        for number in range(0, cards.count(), 20):  # a chart is made when it comes into sight
            cards.nth(number).scroll_into_view_if_needed()
            cards.nth(number).locator(".chart").wait_for()
        assert cards.count() >= len(HOSTILE)
        assert page.evaluate(LIVE)["handlers"] == [] and not problems
        look(f"#/answers?runs={one}", "tbody tr", HOSTILE)  # the choices of verdicts
        for number in range(len(CONTEXTS)):
            own = HOSTILE[number * len(PATTERNS) : (number + 1) * len(PATTERNS)]
            key = page.evaluate("encodeURIComponent", f"1.0.{number}.{own[1]}.0")
            look(f"#/answers?runs={one}&key={key}", ".answer.chosen", own)
        for study in served[0].studies.values():
            look(f"#/results?study={study.id}", "table.results", HOSTILE)
            if study.kind == "eval":
                for number in range(1, len(HOSTILE) // 20 + 1):
                    page.get_by_role("button", name="next").click()
                    page.get_by_text(f"page {number + 1} of").wait_for()
                    assert page.evaluate(LIVE)["handlers"] == [] and not problems
                    shown = page.evaluate("document.body.textContent")
                    assert all(visible(text) in shown for text in HOSTILE[20 * number :][:20])
        for text in HOSTILE[::24]:
            key = page.evaluate("encodeURIComponent", text)
            look(f"#/answers?runs={one}&key={key}", ".problem", ())
        browser.close()
