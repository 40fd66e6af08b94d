"""Folders of experiment and bench in the watch page: numbers of their own tables, and one line for anything else."""

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
from repository import ROOT

from hacpo_mega.watch.runs import Runs, studies_in
from hacpo_mega.watch.studies import Study

EVIDENCE = ROOT / "docs" / "evidence"
NAMES = {"mean of agents", "qwen", "llama", "method"}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def table_of(study: dict[str, Any], title: str) -> dict[str, dict[str, str]]:
    """A table of the page: by first cell the others by their column."""
    (found,) = [table for table in study["tables"] if table["title"] == title]
    return {row[0]: dict(zip(found["head"], row)) for row in found["rows"]}


def printed(text: str, title: str) -> dict[str, dict[str, str]]:
    """The same of a table in Markdown."""
    rows = re.search(rf"### {re.escape(title)}\n\n(.*?)\n\n", text, re.DOTALL)[1].splitlines()
    head, _, *cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]
    return {row[0]: dict(zip(head, row)) for row in cells if row[0] != "(start)"}


@pytest.mark.parametrize(
    ("folder", "regime", "least", "reference"),
    [
        ("evidence", "skills", 80, "gspo_x2"),
        ("evidence_gap", "gap", 80, "gspo_x2"),
        ("evidence_equals", "skills", 80, "naive"),
        ("evidence_unequals", "strong_weak", 80, "naive"),
        ("evidence_conversations", "tools", 15, "gspo_x2"),
        ("evidence_conversations", "relay", 15, "gspo_x2"),
    ],
)
def test_an_experiment_has_the_numbers_of_its_own_tables(folder: str, regime: str, least: int, reference: str) -> None:
    """The experiment itself has written them beside its results."""
    (study,) = studies_in(ROOT / "docs" / folder)
    assert study.content()["reference"] == "gspo_x2", "agents alone, where no grid says another"
    found, text = study.content(reference), (ROOT / "docs" / folder / "README.md").read_text()
    compared = 0
    for title in ("accuracy", f"difference to {reference}"):
        own, theirs = table_of(found, f"{regime}: {title}"), printed(text, f"{regime}: {title}")
        assert own.keys() >= theirs.keys()  # and methods that are in the grid no more
        for method, row in theirs.items():
            for name in NAMES & row.keys():
                assert own[method][name] == row[name], (title, method, name)
                compared += 1
    assert compared > least and found["reference"] == reference


def test_seeds_are_a_mean_with_a_band() -> None:
    runs = [json.loads(line) for line in (EVIDENCE / "runs.jsonl").read_text().splitlines()]
    own = [run for run in runs if (run["method"], run["stage"]) == ("naive", "reported")]
    charts = {chart["title"]: chart["lines"] for chart in Study(EVIDENCE, "experiment").content()["charts"]}
    (line,) = [line for line in charts["skills: qwen"] if line["label"].startswith("naive,")]
    curves = [run["curves"]["accuracy"]["qwen"] for run in own]
    assert line["label"] == f"naive, {len(own)} seeds" and line["x"]["steps"] == own[0]["steps"]
    for n, column in enumerate(zip(*curves, strict=True)):
        assert math.isclose(line["y"][n], sum(column) / len(column), rel_tol=1e-12)
        assert (line["low"][n], line["high"][n]) == (min(column), max(column))
    spent = [sum(run["curves"]["trained_answers"][agent][-1] for agent in run["agents"]) for run in own]
    assert math.isclose(line["x"]["trained_answers"][-1], sum(spent) / len(spent), rel_tol=1e-12)


def begun(values: Any) -> Any:
    """The first three of numbers at five steps; anything else as it is."""
    return values[:3] if isinstance(values, list) and len(values) == 5 else values


def test_results_that_arrive_are_seen_and_a_wrong_one_is_a_line(tmp_path: Path) -> None:
    runs = map(json.loads, (EVIDENCE / "runs.jsonl").read_text().splitlines())
    run = next(run for run in runs if (run["method"], run["stage"]) == ("sgt", "reported"))
    for seed in (1, 2):
        (tmp_path / f"skills.sgt.lr-0.0004.seed-{seed}.json").write_text(json.dumps(run | {"seed": seed}))
        (study,) = Runs([tmp_path], print).studies.values()
        assert study.content()["charts"][0]["lines"][0]["label"].endswith(f"{seed} seed{'s' * (seed > 1)}")
    other = run | {"seed": 3, "learning_rate": 0.0002}
    (tmp_path / "skills.sgt.lr-0.0002.seed-3.json").write_text(json.dumps(other))
    names = {"(start)": "", "sgt at 0.0002": "1", "sgt at 0.0004": "2"}
    assert {row[0]: row[-1] for row in study.content()["tables"][0]["rows"]} == names
    early = json.loads(json.dumps(run | {"seed": 4}), object_hook=lambda table: {k: begun(v) for k, v in table.items()})
    (tmp_path / "skills.sgt.lr-0.0004.seed-4.json").write_text(json.dumps(early))
    (_, line) = study.content()["charts"][0]["lines"]
    assert (line["label"], line["x"]["steps"], len(line["low"])) == ("sgt at 0.0004, 3 seeds", run["steps"][:3], 3)
    assert line["x"]["seconds"] == run["seconds"][:3]
    assert study.content()["notes"] == [
        "skills, sgt at 0.0004: seeds were evaluated at other steps; those in common are shown."
    ]
    for content, why in (
        (run | {"seed": "x"}, "(seed: Input should be a valid integer"),
        (run | {"steps": [0]}, "other lengths"),
        (run | {"agents": ["A"]}, "its agents"),
        ([], "(all: Input should be a valid dictionary"),
        (run | {"curves": {"accuracy": {"A": [1e101]}}}, "(curves.accuracy.A.0: "),
        (
            run | {"regime": "other", "method": "a\nb", "curves": {"accuracy": {"a\nb": ["x"]}}},
            "(curves.accuracy.a\\nb.0: ",
        ),
    ):
        (tmp_path / "skills.sgt.lr-0.0004.seed-3.json").write_text(json.dumps(content))
        with pytest.raises(ValueError, match=re.escape(why)) as error:
            study.content()
        assert "\n" not in str(error.value) and "seed-3.json" in str(error.value)
    with pytest.raises(ValueError, match="no method 'x'"):
        Study(EVIDENCE, "experiment").content("x")
    for file in tmp_path.glob("*.json"):
        file.unlink()
    with pytest.raises(ValueError, match="moved or deleted"):
        study.content()


def agent(seconds: dict[str, float], trained: float) -> dict[str, Any]:
    rates = {"generated_per_s": 900.4, "trained_per_s": 640.0, "idle_share": 0.25, "flops_per_s": {"learn": 2.5e9}}
    return {"phases_s": seconds, "trained_answers": trained, "seconds_per_1000": 31.25 if trained else math.inf} | rates


def test_a_benchmark_by_hand(tmp_path: Path) -> None:
    schedule = {"name": "hacpo", "wall_s": 2.0, "p50_s": 1.9, "p95_s": 2.4, "by_round_s": [1.8, 2.2], "together": 1.7}
    turns = schedule | {"name": "in turns", "wall_s": 3.0, "together": None}
    agents = {"qwen": agent({"learn": 0.5, "roll_out": 1.0}, 64.0), "llama": agent({"learn": 1.5}, 0.0)}
    content = {"facts": {"machine": "2 cores"}, "schedules": [one | {"agents": agents} for one in (schedule, turns)]}
    (tmp_path / "bench.json").write_text(json.dumps(content))
    (study,) = studies_in(tmp_path)
    found = study.content()
    assert table_of(found, "Schedules")["in turns"]["hacpo needs"] == "0.67" and study.kind == "bench"
    assert table_of(found, "Schedules")["hacpo"]["by round"] == "1.80 2.20"
    assert (
        table_of(found, "Agents")["hacpo"] | {"idle": "25%", "model GFLOP/s": "learn 2.50"}
        == (table_of(found, "Agents")["hacpo"])
    )
    (bars,) = found["bars"]
    assert [(row["label"], row["whole"]) for row in bars["rows"]][::3] == [
        ("hacpo, qwen", 2.0),
        ("in turns, llama", 3.0),
    ]
    assert [part[:2] for part in bars["rows"][0]["parts"]] == [["roll_out", 1.0], ["learn", 0.5]]
    (tmp_path / "bench.json").write_text(json.dumps(content | {"schedules": [schedule]}))
    with pytest.raises(ValueError, match=r"bench.json is no result of `hacpo-mega bench`: agents is missing"):
        study.content()
