"""The report of a run folder that the real writers wrote: numbers, pictures, a page that stands alone."""

import functools
import gzip
import html
import json
import math
import operator
import re
import warnings
from collections.abc import Iterator
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from job import run_here
from matplotlib import image
from matplotlib.axes import Axes
from matplotlib.colors import to_hex, to_rgb
from matplotlib.figure import Figure
from scipy.stats import binomtest
from written_run import NUM_EVALUATED, Page, write_run

from hacpo_mega.cluster.groups.spans import Span
from hacpo_mega.cluster.rank_map import AgentShape, RankMap
from hacpo_mega.logbook.console import PHASES
from hacpo_mega.logbook.files.metrics import MetricsWriter, StepMetrics, read_metrics
from hacpo_mega.logbook.files.rollout_log import read_rollouts
from hacpo_mega.logbook.files.trace import Track, chrome_trace, write_trace
from hacpo_mega.report import summary, write_report
from hacpo_mega.report.canvas import MOST_BARS, label_ends, panels, report_style, stack, to_inline_svg, to_png
from hacpo_mega.report.catalogue import AGENT_COLOURS, BAND_COLOURS, FATE_COLOURS, PHASE_COLOURS, SECTIONS
from hacpo_mega.report.page import choose_prompts, render_page
from hacpo_mega.report.plots import draw, draw_pictures, draw_timeline, figures_of
from hacpo_mega.report.run import Run, Series, load_run
from hacpo_mega.report.verdicts import verdicts

HOSTILE = 'x</pre><script>alert(1)</script><img src="http://evil/x.png" onerror="alert(2)">&amp;'


@pytest.fixture(scope="module")
def reported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "two"
    write_run(folder, ("qwen", "llama"), num_steps=10, evaluate_every=5, answer=HOSTILE)
    assert write_report(folder) == folder / "report.html"
    return folder


def test_page_stands_alone_and_is_well_formed(reported: Path) -> None:
    text = (reported / "report.html").read_text(encoding="utf-8")
    page = Page(text)
    assert page.open == [], "every element is closed"
    outside = [reference for reference in page.references if not reference.startswith("#")]
    assert outside == [] and not re.search(r"url\((?!#)|@import|<link", text)
    assert '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; img-src data:; ' in text
    assert {f"#{name}" for name in page.ids} >= set(page.references), "every reference has its target"
    assert len(set(page.ids)) == len(page.ids), "no id is used by two figures"


def test_answers_are_text_and_never_markup(reported: Path) -> None:
    page = Page((reported / "report.html").read_text(encoding="utf-8"))
    assert not {"script", "img"} & set(page.tags)
    assert f"{HOSTILE} 0" in page.text


def test_page_shows_the_numbers_of_the_run(reported: Path) -> None:
    text = Page((reported / "report.html").read_text(encoding="utf-8")).text
    # qwen: 330 of 600 before, 402 of 600 after; sqrt(.55 * .45 / 600) = .0203, sqrt(.67 * .33 / 600) = .0192
    for right in (round(0.55 * NUM_EVALUATED), round(0.67 * NUM_EVALUATED)):
        wilson = binomtest(right, NUM_EVALUATED).proportion_ci(method="wilson")
        assert f"{right / NUM_EVALUATED:.3f} [{wilson.low:.3f}, {wilson.high:.3f}]" in text
    assert "2,560 answers given" in text  # 256 in each of ten steps
    assert "10 of 10 steps" in text and "hacpo / paper" in text
    (prompt, *_) = read_rollouts(reported, 10)
    answer = prompt["answers"][4]
    assert answer["agent"] == "llama" and answer["verdict"] == "correct"
    learner = f"→ qwen A {answer['advantage']['qwen']:+.2f}, ratio {answer['ratio']['qwen']:.3f}"
    assert learner in text and "unjudged · timeout · 12 tokens" in text


def test_curves_are_png_files_with_something_on_them(reported: Path) -> None:
    pictures = {path.stem: path for path in (reported / "report").glob("*.png")}
    charts = "accuracy reward capability omega fates bands ratio ess signs cosine health phases time timeline"
    assert set(pictures) == set(charts.split())
    for stem in ("accuracy", "reward", "omega", "ratio", "ess", "signs", "cosine"):
        for colour in AGENT_COLOURS[:2]:
            assert num_pixels(pictures[stem], colour) > 200, f"{stem} has no curve of colour {colour}"
        assert num_pixels(pictures[stem], AGENT_COLOURS[2]) == 0, "there is no third agent"


def num_pixels(picture: Path, colour: str) -> int:
    """Number of pixels of a PNG that are of a colour, given as #rrggbb."""
    wanted = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    return int((np.abs(image.imread(picture)[:, :, :3] - wanted).max(axis=2) < 0.01).sum())


@pytest.mark.nightly
def test_two_reports_of_one_run_are_the_same_bytes(reported: Path) -> None:
    files = [reported / "report.html", *sorted((reported / "report").glob("*.png"))]
    before = [file.read_bytes() for file in files]
    write_report(reported)
    assert [file.read_bytes() for file in files] == before


def test_summary_is_the_run_in_short(reported: Path) -> None:
    short = json.loads(json.dumps(summary(reported), allow_nan=False))
    assert (short["method"], short["seed"], short["num_steps"], short["num_answers"]) == ("hacpo", 7, 10, 5120)
    assert list(short["phase_s"]) == [*PHASES, "other"]
    qwen = short["agents"]["qwen"]
    assert qwen["accuracy_start"] == 330 / 600 and qwen["accuracy_end"] == 402 / 600
    assert (qwen["num_steps"], qwen["num_answers"]) == (10, 2560)
    steps = read_metrics(reported / "metrics.jsonl")
    learn = [steps[step].timing["agent/qwen/phase/learn_s"] for step in range(1, 11)]
    assert qwen["phase_s"]["learn"] == pytest.approx(sum(learn) / 10, abs=1e-6)


def test_a_graded_reward_is_no_accuracy_in_a_report(tmp_path: Path) -> None:
    """Every answer earns .9 before and .9 or 1 after: titles, words, error, the names of pictures and numbers."""
    prefix, count = "agent/a", {"agent/a/num_evaluated": 40.0}
    with MetricsWriter(tmp_path) as writer:
        before = {f"{prefix}/eval/reward_mean": 0.9, f"{prefix}/eval/reward_square": 0.81}
        after = {f"{prefix}/eval/reward_mean": 0.95, f"{prefix}/eval/reward_square": 0.905}
        for step, values in enumerate((before, after)):
            writer.write(step, StepMetrics(values | count, {"time_unix_s": 1.0}))
    run = load_run(tmp_path)
    pictures = {picture.stem: picture for picture in draw_pictures(run)}
    assert (
        pictures["mean_reward"].title == "Held-out mean reward"
        and "mean reward on held-out prompts" in pictures["mean_reward"].svg
    )
    text = Page(render_page(run, [])).text
    assert "Mean reward before and after" in text and "held-out mean reward" in text
    assert not re.search("accuracy", text, re.IGNORECASE)
    # 1.96 sqrt(.905 - .95^2) / sqrt(40) = .0155
    assert "0.900 (all 40 equal)" in text and "0.950 [0.935, 0.965]" in text and "+0.050 [" not in text
    short = summary(tmp_path)["agents"]["a"]
    assert (short["mean_reward_start"], short["mean_reward_end"]) == (0.9, 0.95) and "accuracy_end" not in short


@pytest.mark.parametrize(("later", "colour"), [(0.52, ""), (0.62, "up"), (0.38, "down")])
def test_a_gain_is_green_only_where_its_interval_excludes_0(tmp_path: Path, later: float, colour: str) -> None:
    """200 prompts: .50 to .52 may be chance, .62 and .38 are none."""
    with MetricsWriter(tmp_path) as writer:
        for step, accuracy in ((0, 0.5), (1, later)):
            writer.write(step, StepMetrics({"agent/a/accuracy": accuracy, "agent/a/num_evaluated": 200.0}, {}))
    text = render_page(load_run(tmp_path), [])
    assert f'<div class="{f"gain {colour}".strip()}">{later - 0.5:+.3f} [' in text
    assert f'<span class="{colour}">{later - 0.5:+.3f} [' in text


def test_the_command_prints_the_summary_or_says_what_is_wrong(reported: Path) -> None:
    done = run_here("report", "--json", reported)
    assert done.returncode == 0
    assert json.loads(done.stdout) == summary(reported)
    refused = run_here("report", "--json", reported / "report")
    assert refused.returncode == 2 and "has no metrics.jsonl" in refused.stderr and "Traceback" not in refused.stderr


@pytest.mark.nightly
def test_a_run_that_was_killed_early_still_reports(tmp_path: Path) -> None:
    write_run(tmp_path, ("qwen", "llama"), num_steps=6, evaluate_every=6)
    path = tmp_path / "metrics.jsonl"
    lines = path.read_bytes().split(b"\n")
    path.write_bytes(b"\n".join(lines[:4]) + b"\n" + lines[4][:50])  # steps 0 to 3, and a torn one
    short = summary(tmp_path)
    assert short["num_steps"] == 3
    assert (short["agents"]["llama"]["accuracy_start"], short["agents"]["llama"]["accuracy_end"]) == (0.6, None)
    text = Page(write_report(tmp_path).read_text(encoding="utf-8")).text
    assert "3 of 6 steps" in text and "held-out accuracy, step 0" in text


@pytest.mark.nightly
@pytest.mark.parametrize(("agents", "pairs"), [(("solo",), 0), (("a", "b", "c", "d", "e"), 20)])
def test_any_number_of_agents_without_evaluation(tmp_path: Path, agents: tuple[str, ...], pairs: int) -> None:
    write_run(tmp_path, agents, num_steps=2, evaluate_every=0)
    text = write_report(tmp_path).read_text(encoding="utf-8")
    drawn = {path.stem for path in (tmp_path / "report").glob("*.png")}
    assert "accuracy" not in drawn and "reward" in drawn
    assert ({"omega", "bands", "ratio", "ess", "signs", "cosine"} <= drawn) == bool(pairs)
    assert "Accuracy before and after" not in text
    assert all(agent["accuracy_start"] is None for agent in summary(tmp_path)["agents"].values())


def test_a_bare_metrics_file_is_enough(tmp_path: Path) -> None:
    """No configuration, no rollouts, a NaN in the middle: the page shows what there is."""
    with MetricsWriter(tmp_path) as writer:
        for step, value in ((1, 0.5), (2, math.nan), (3, 0.7)):
            writer.write(step, StepMetrics({"agent/only/reward_mean": value}, {}))
    page = Page(write_report(tmp_path).read_text(encoding="utf-8"))
    assert "0.500 → 0.700" in page.text and "Sample prompts" not in page.text
    assert summary(tmp_path)["method"] is None and summary(tmp_path)["num_answers"] is None


@pytest.mark.nightly
def test_the_timeline_is_drawn_from_the_trace_where_there_is_one(tmp_path: Path) -> None:
    """Two ranks learn for 3 and 1 of 4 seconds; the second waits in its exchange. By pixels of a phase's colour."""
    write_run(tmp_path, ("a", "b"), num_steps=1, evaluate_every=0)
    picture = tmp_path / "timeline.png"

    def draw_again() -> None:
        with report_style():
            picture.write_bytes(to_png(draw_timeline(load_run(tmp_path))))

    draw_again()
    measured = num_pixels(picture, PHASE_COLOURS["publish"])
    assert measured > 1000, "the seconds of the phases, which the run has"
    spans = {0: (Span("learn", "phase", 0.0, 3.0), Span("exchange", "phase", 3.0, 4.0))}
    waits = Span("barrier", "collective", 1.0, 4.0, "job", 0)
    spans[1] = (Span("learn", "phase", 0.0, 1.0), Span("exchange", "phase", 1.0, 4.0), waits)
    spans[0] += (waits._replace(begin_s=3.0),)
    ranks = RankMap(1, (AgentShape("a"), AgentShape("b")))
    tracks = [Track(ranks.coordinate(rank), 0.0, 0.0, found) for rank, found in spans.items()]
    assert write_trace(tmp_path, 1, chrome_trace(1, tracks)) is None
    draw_again()
    pixels = {name: num_pixels(picture, PHASE_COLOURS[name]) for name in PHASE_COLOURS}
    assert pixels["publish"] == 0, "what is not in the trace is not drawn"
    assert pixels["learn"] > 1.3 * pixels["exchange"], "4 s each, but most of one exchange is a wait"
    whole = (tmp_path / "trace" / "step_000001.json.gz").read_bytes()
    damaged = whole[: len(whole) // 2] + bytes(9) + whole[len(whole) // 2 + 9 :]
    deep, infinite = (gzip.compress(text) for text in (b"[" * 100_000, b'{"traceEvents": [{"ph": "X", "ts": 1e999}]}'))
    for content in (b"no trace", damaged, deep, infinite):
        (tmp_path / "trace" / "step_000001.json.gz").write_bytes(content)
        with pytest.raises(ValueError, match=r"step_000001.json.gz is not a trace of a step"):
            draw_again()


@pytest.mark.nightly
def test_a_strip_shows_every_token_on_its_learners_advantage(tmp_path: Path) -> None:
    """Ratios 0.5, 1 and 1.05 of the own agent are marked strongly below, not at all, and above."""
    write_run(tmp_path, ("a", "b"), num_steps=1, evaluate_every=0)
    path = tmp_path / "rollouts" / "step_000001.lane_0000.jsonl"
    prompt = json.loads(path.read_text().splitlines()[0])
    answer = prompt["answers"][0] | {"tokens": ["4<b>", "+", "5"], "token_logprob": [-0.25, -1.0, -2.0]}
    answer |= {"token_ratio": [0.5, 1.0, 1.05], "advantage": {"a": -1.5, "b": 2.0}, "ratio": {"b": 0.7}}
    path.write_text(json.dumps(prompt | {"answers": [answer]}) + "\n")
    text = render_page(load_run(tmp_path), [])
    own = '<div class="strip down" style="--depth:30%"><span class="less strong" title="log-prob -0.250, ratio 0.500">'
    assert f"{own}4&lt;b&gt;</span>" in text
    assert '<span class="" title="log-prob -1.000, ratio 1.000">+</span>' in text
    assert '<span class="more" title="log-prob -2.000, ratio 1.050">5</span>' in text
    other = '<div class="strip up" style="--depth:40%"><span class="less strong" title="log-prob -0.250, ratio 0.700">'
    assert f"{other}4&lt;b&gt;</span>" in text


@pytest.mark.nightly
def test_one_step_alone_is_drawn(tmp_path: Path) -> None:
    write_run(tmp_path, ("a", "b"), num_steps=1, evaluate_every=1)
    write_report(tmp_path)
    assert num_pixels(tmp_path / "report" / "bands.png", BAND_COLOURS["inside"]) > 10_000
    assert num_pixels(tmp_path / "report" / "ratio.png", AGENT_COLOURS[0]) > 40, "a lonely point needs a marker"


def test_what_is_no_run_is_refused_with_a_reason(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"is no folder: give the run_dir"):
        write_report(tmp_path / "nowhere")
    with pytest.raises(ValueError, match=r"has no metrics.jsonl"):
        summary(tmp_path)
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "val')
    with pytest.raises(ValueError, match=r"no finished line yet"):
        summary(tmp_path)
    with MetricsWriter(tmp_path) as writer:
        writer.write(1, StepMetrics({}, {}))
    (tmp_path / "config.toml").write_text("seed = ")
    with pytest.raises(ValueError, match=r"config.toml: not valid TOML"):
        write_report(tmp_path)


KNOWN = (2, 4, 5, 14)  # of 17 steps, those in which another agent's answers were trained on


@pytest.fixture(scope="module")
def gappy(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run whose first agent trained on another's answers in KNOWN alone, once on one and else on 40."""
    folder = tmp_path_factory.mktemp("runs") / "gappy"
    write_run(folder, ("a", "b"), num_steps=17, evaluate_every=5)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    for line in lines:
        step, values, pair = line["step"], line["values"], "agent/a/from/b"
        values["agent/a/reward_mean"] = values.get("agent/a/reward_mean", 0.5) if step in KNOWN else "nan"
        for name in [name for name in values if name.startswith(pair) or name == "agent/a/grad_norm"]:
            if step not in KNOWN and "/view/" not in name:
                del values[name]
        if step:
            trained = {4: 1.0}.get(step, 40.0) if step in KNOWN else 0.0
            lost = {"too_long": 20.0, "zero_advantage": 40.0 - trained + 4.0}
            counts = {"answers": 64.0, "trained": trained} | lost
            values |= {f"{pair}/view/num_{what}": number for what, number in counts.items()}
        else:
            line["timing"]["agent/a/phase_mean/load_s"] = 1000.0
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return load_run(folder)


def spans(axis: Axes) -> dict[str, list[tuple[float, float]]]:
    """The span of each mark of a panel, from where to where in steps, by its colour; level lines are no marks."""
    found: dict[str, list[tuple[float, float]]] = {}
    for line in axis.lines:
        if line.get_transform() == axis.transData:
            x, y = (np.asarray(column, dtype=float) for column in line.get_data())
            joined = line.get_linestyle() != "None"
            for k in range(len(x) - 1 if joined else 0):
                if np.isfinite(y[k : k + 2]).all():
                    found.setdefault(to_hex(line.get_color()), []).append((x[k], x[k + 1]))
            found.setdefault(to_hex(line.get_color()), []).extend((s, s) for s in x[np.isfinite(y)])
    for marks in axis.collections:
        for path in marks.get_paths():
            x = path.vertices[:, 0]
            found.setdefault(to_hex(marks.get_facecolor()[0]), []).append((x.min(), x.max()))
    return found


def drawn(run: Run, chart: str) -> Figure:
    """The figure that has a chart of the catalogue."""
    (figure,) = (
        draw(run, *specs)
        for section in SECTIONS
        for specs in figures_of(section)
        if any(spec.id == chart for spec in specs)
    )
    return figure


def test_long_names_of_agents_leave_panels_room_and_cover_no_other(tmp_path: Path) -> None:
    for chart, number in (("omega", 8), ("bands", 4)):
        agents = tuple(f"Qwen2.5-Math-{n}B-Instruct-with-a-long-name" for n in range(number))
        pairs = [(a, b) for a in agents for b in agents if a != b]
        values = {f"omega/{a}/{b}": 1.0 for a, b in pairs}
        values |= {f"agent/{a}/from/{b}/{side}": 1 / 3 for a, b in pairs for side in BAND_COLOURS}
        with report_style(), warnings.catch_warnings(action="error"):  # a layout that cannot be had is one
            figure = drawn(Run(tmp_path, {}, "", dict.fromkeys((1, 2), StepMetrics(values, {})), agents, []), chart)
            figure.draw_without_rendering()
        titles = [axis._left_title.get_window_extent() for axis in figure.axes]
        assert not any(one.overlaps(two) for one, two in combinations(titles, 2))


@pytest.mark.parametrize("chart", ["reward", "ratio", "ess", "signs", "cosine", "bands", "grad_norm"])
def test_no_picture_covers_a_step_without_its_number(gappy: Run, chart: str) -> None:
    """In steps: no line is drawn over one that is missing, no bar reaches into its half step to each side."""
    axis = drawn(gappy, chart).axes[0]
    assert axis.get_xlim() == (-0.5, 17.5), "the run's steps, in every panel"
    marks = spans(axis)
    of_a = AGENT_COLOURS[0] if chart in ("reward", "grad_norm") else AGENT_COLOURS[1]
    colours = BAND_COLOURS.values() if chart == "bands" else [of_a]
    for colour in colours:
        assert marks[colour], f"nothing is drawn in {colour}"
        for begin, end in marks[colour]:
            assert {step for step in range(18) if begin - 0.49 < step < end + 0.49} <= set(KNOWN), (begin, end)
    covered = {step for colour in colours for begin, end in marks[colour] for step in range(18) if begin <= step <= end}
    assert covered == set(KNOWN)


def test_the_number_of_answers_behind_a_point_shows(gappy: Run) -> None:
    """Bars below the points are as high as answers are many, and the panel's title says how many."""
    axis = drawn(gappy, "bands").axes[0]
    assert axis.get_title() == "a from b\n1 to 40 answers a step"
    bottom, tops = axis.get_ylim()[0], dict.fromkeys(KNOWN, 0.0)
    for path in axis.collections[-1].get_paths():
        for (x, y), (next_x, _) in zip(path.vertices, path.vertices[1:]):
            for step in KNOWN:
                if {x, next_x} == {step - 0.5, step + 0.5}:
                    tops[step] = max(tops[step], y - bottom)
    strip = 0.22 * 0.8  # of the share's 100 %; full at the 256 answers of the other panel, and 8 % full at least
    assert tops == pytest.approx({2: strip * 40 / 256, 4: strip * 0.08, 5: strip * 40 / 256, 14: strip * 40 / 256})
    opacity = {marks.get_alpha() for marks in axis.collections[:-1]}
    assert opacity == {1.0, 0.35}, "one answer is paler than forty"


def test_the_fate_of_every_answer_is_stacked_and_said_on_the_page(gappy: Run) -> None:
    axis = drawn(gappy, "fates").axes[0]
    marks = spans(axis)
    assert axis.get_title() == "a from b: 12% teach"
    top = max(path.vertices[:, 1].max() for marks in axis.collections for path in marks.get_paths())
    assert top == 64.0 and marks[FATE_COLOURS["too_long"]] == [(0.5, 17.5)]
    reached = marks[FATE_COLOURS["reached"]]
    assert reached and all(end - begin <= 17 for begin, end in reached)
    page = Page(render_page(gappy, [])).text
    assert "of others: " in page and "learnt next to nothing" not in page


def test_a_page_is_not_proud_where_nothing_was_shared(tmp_path: Path) -> None:
    write_run(tmp_path, ("a", "b"), num_steps=3, evaluate_every=3)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    for line in lines[1:]:
        fates = {"answers": 64.0, "trained": 2.0, "too_long": 20.0, "undecodable": 38.0, "zero_advantage": 4.0}
        line["values"] |= {f"agent/a/from/b/view/num_{fate}": number for fate, number in fates.items()}
        line["values"]["agent/a/from/b/inside"] = 0.5
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    text = Page(render_page(load_run(tmp_path), [])).text
    assert (
        "a learnt next to nothing from b: 3 of 180 usable answers reached it (114 undecodable, 60 too long, "
        "3 outside the band, 12 with advantage 0, unjudged or empty, which is no loss)"
    ) in text
    assert "learnt alone: 3 of 180 usable answers reached it (2%)" in text
    assert "b learnt next to nothing" not in text


def test_loading_neither_flattens_the_steps_nor_looks_like_another_phase(gappy: Run) -> None:
    figure = drawn(gappy, "phases")
    assert figure.axes[0].get_ylim()[1] < 20, "1,000 s of loading are in no step"
    colours = [np.array(to_rgb(colour)) for colour in PHASE_COLOURS.values()]
    assert min(np.abs(one - two).max() for one, two in combinations(colours, 2)) > 0.08


def test_names_of_curves_that_end_together_stay_apart_inside_their_panel() -> None:
    _, (axis,) = panels(1, 1, 2.2)
    last = Series((1,), (1.0,))
    label_ends(axis, [(last, f"agent{n}", "#000000") for n in range(8)])
    places = sorted(text.xy[1] for text in axis.texts)
    assert places[-1] == 1.0 == axis.get_ylim()[1] and places[0] > 0.0
    assert min(upper - lower for lower, upper in pairwise(places)) > 0.08


def test_a_long_run_has_as_many_bars_as_its_figure_has_points() -> None:
    """A bar per step made a page of 57 MB of 20,000 steps."""
    figure, (axis,) = panels(1, 1, 2.0)
    steps = range(1, 20_001)
    stack(axis, steps, [[float(step % 2) for step in steps], [2.0 for _ in steps]], ["red", "blue"])
    for layer, low, high in zip(axis.collections, (0.0, 0.5), (0.5, 2.5), strict=True):
        (outline,) = (path.vertices for path in layer.get_paths())
        assert len(outline) < 4 * MOST_BARS + 8
        assert (outline[:, 0].min(), outline[:, 0].max()) == (0.5, 20_000.5)
        assert set(np.unique(outline[:, 1])) == {low, high}
    assert len(to_inline_svg(figure, "long")) < 200_000


def test_the_page_says_under_a_chart_what_it_means(reported: Path) -> None:
    """The verdicts of the page of `watch`, at the chart that they are about."""
    text = (reported / "report.html").read_text(encoding="utf-8")
    said = verdicts(load_run(reported))
    assert {one["chart"] for one in said} >= {"omega", "ratio", "bands", "accuracy"}
    for one in said:
        assert f'<p class="verdict {one["level"]}">{html.escape(one["text"])}</p>' in text


def test_a_share_is_drawn_to_100_percent_and_panels_fill_their_row(gappy: Run) -> None:
    axis = drawn(gappy, "ess").axes[0]
    assert max(axis.get_yticks()) == 1.0 and axis.get_ylim()[1] == 1.02
    right = [axis.get_subplotspec().get_position(axis.figure).x1 for axis in drawn(gappy, "grad_norm").axes]
    assert len(right) % 2 == 1 and right[-1] == max(right), "the last of an odd number is as wide as the page"


def test_only_what_trained_a_learner_is_coloured_and_the_rest_explained(tmp_path: Path) -> None:
    """A chat with its system message apart, below the name of its row, and three fates of an answer."""
    write_run(tmp_path, ("a", "b"), num_steps=1, evaluate_every=0)
    path = tmp_path / "rollouts" / "step_000001.lane_0000.jsonl"
    prompt = json.loads(path.read_text().splitlines()[0]) | {"skill": "", "row": {"uid": "row-7"}}
    prompt["prompt"] = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1+1?"}]
    answer = prompt["answers"][0] | {"advantage": {"a": 3.4, "b": -2.0}, "ratio": {"a": 1.0}}
    fates = ({"b": "undecodable"}, {"b": "outside_band"}, {})
    answers = [answer | {"text": f"text {n}", "not_trained": fate} for n, fate in enumerate(fates)]
    answers[1] = answers[1] | {"ratio": {"a": 1.0, "b": 0.3}}
    path.write_text(json.dumps(prompt | {"answers": answers}) + "\n")
    text = render_page(load_run(tmp_path), [])
    trained = '<span class="learner up"><b>→ a</b> A +3.40, ratio 1.000</span>'
    assert text.count(trained) == 3
    assert '<span class="learner"><b>→ b</b> not trained: undecodable</span>' in text
    assert '<span class="learner"><b>→ b</b> A -2.00, ratio 0.300, outside the band</span>' in text
    assert text.count("→ b") == 2, "who shares nothing is not named"
    assert '<div class="message system"><small>system</small><pre>Be brief.</pre></div>' in text
    assert '<span class="skill">row-7</span>' in text and "&quot;role&quot;" not in text


def test_an_older_run_without_reasons_shows_what_was_not_trained(tmp_path: Path) -> None:
    write_run(tmp_path, ("a", "b"), num_steps=1, evaluate_every=0)
    path = tmp_path / "rollouts" / "step_000001.lane_0000.jsonl"
    prompt = json.loads(path.read_text().splitlines()[0])
    chat = '[{"role":"system","content":"Be brief."},{"role":"user","content":"1+1?"}]'
    answer = prompt["answers"][0] | {"advantage": {"a": 3.4, "b": -2.0}, "ratio": {"a": 1.0}}
    del answer["not_trained"]
    path.write_text(json.dumps(prompt | {"prompt": chat, "answers": [answer]}) + "\n")
    text = render_page(load_run(tmp_path), [])
    assert '<span class="learner"><b>→ b</b> not trained</span>' in text and "<pre>1+1?</pre>" in text


@pytest.mark.nightly
def test_equal_answers_are_shown_once_with_their_number(tmp_path: Path) -> None:
    write_run(tmp_path, ("a",), num_steps=1, evaluate_every=0)
    path = tmp_path / "rollouts" / "step_000001.lane_0000.jsonl"
    path.write_text(
        re.sub(r"7\+5=12;12 [12]", "same", path.read_text()).replace("no_answer", "wrong").replace("length", "eos")
    )
    text = Page(write_report(tmp_path).read_text(encoding="utf-8")).text
    assert text.count("same") == 3 and text.count("2 times") == 3, "once in each of the three prompts"


def test_samples_prefer_prompts_with_mixed_rewards_and_alternate_skills() -> None:
    def prompt(index: int, skill: str, rewards: list[float | None]) -> dict[str, object]:
        return {"prompt_index": index, "skill": skill, "answers": [{"reward": reward} for reward in rewards]}

    prompts = [prompt(i, "add", [1.0, 1.0]) for i in range(5)] + [prompt(5, "add", [1.0, 0.0])]
    prompts += [prompt(6, "mul", [0.0, 0.0]), prompt(7, "mul", [0.0, None])]
    assert [p["prompt_index"] for p in choose_prompts(prompts, 4)] == [5, 7, 0, 6]


# In the place of each value of a row: none of the right shape for every field.
OTHERS = ("null", '"x"', "-1", "1e400", "[]", "{}", "true", '[{"a": [1]}]', '{"a": {"b": []}}', f"1{'0' * 400}", "NaN")
ROWS = {
    "rollouts/step_000001.lane_0000.jsonl": lambda run: render_page(load_run(run), []),
    "metrics.jsonl": lambda run: (summary(run), render_page(load_run(run), [])),
    "starts.jsonl": lambda run: render_page(load_run(run), []),
}


def keys_in(value: Any, way: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    """The ways to all values of a table; of a list those of its first entry."""
    entries = value.items() if isinstance(value, dict) else enumerate(value[:1]) if isinstance(value, list) else ()
    for key, inner in entries:
        yield (*way, key)
        yield from keys_in(inner, (*way, key))


def altered(row: dict[str, Any], way: tuple[str | int, ...], other: str | None) -> str:
    """The row as a line, with another value there; None: with none."""
    row = json.loads(json.dumps(row))
    *above, last = way
    place = functools.reduce(operator.getitem, above, row)
    del place[last]
    if other is not None:
        place.insert(last, "OTHER") if isinstance(place, list) else place.update({last: "OTHER"})
    return json.dumps(row).replace('"OTHER"', str(other)) + "\n"


@pytest.mark.parametrize("share", [7, pytest.param(1, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("name", ROWS)
def test_a_row_of_another_shape_is_shown_or_named_by_line_and_field(name: str, share: int, tmp_path: Path) -> None:
    """All other values in each place, or every seventh of them."""
    write_run(tmp_path, ("a", "b"), num_steps=1, evaluate_every=1)
    start = {"time_unix_s": 1.0, "steps_done": 0, "models": {"a": "m"}, "commit": None, "packages": {"torch": "2"}}
    (tmp_path / "starts.jsonl").write_text(json.dumps(start) + "\n")
    first, *rest = (tmp_path / name).read_text().splitlines(keepends=True)
    row = json.loads(first)
    if "answers" in row:
        tokens = {"tokens": ["4"], "token_ids": [1], "token_logprob": [-0.5], "token_ratio": [1.0]}
        row |= {"answers": [row["answers"][0] | tokens], "prompt_token_ids": {"a": [1]}, "row": {"uid": 1}, "tools": []}
    num_refused = 0
    cases = [(way, other) for way in keys_in(row) for other in (None, *OTHERS)]
    for way, other in cases[::share]:
        (tmp_path / name).write_text("".join([altered(row, way, other), *rest]))
        said = ""
        try:
            ROWS[name](tmp_path)
        except ValueError as error:
            said, num_refused = str(error), num_refused + 1
        assert not said or said.startswith(f"{tmp_path / name}, line 1: not "), (way, other, said)
        assert not said or ("\n" not in said and re.search(r"is missing|, needs |invalid|deep", said)), said
    assert num_refused > len(cases) / (4 * share)
