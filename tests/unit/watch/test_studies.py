"""Folders of experiment, bench and eval in the page: numbers of their own tables, and one line for anything else."""

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
from repository import ROOT

from hacpo_mega.evaluation.answers import Answer, AnswerFile
from hacpo_mega.evaluation.table import BenchmarkResult, Estimate, Evaluation, write_evaluation
from hacpo_mega.watch.runs import Runs, studies_in
from hacpo_mega.watch.studies import Study, kinds_of

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
    assert study.shown()["reference"] == "gspo_x2", "agents alone, where no grid says another"
    found, text = study.shown(reference), (ROOT / "docs" / folder / "README.md").read_text()
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
    charts = {chart["title"]: chart["lines"] for chart in Study(EVIDENCE, "experiment").shown()["charts"]}
    (line,) = [line for line in charts["skills: qwen"] if line["label"].startswith("naive,")]
    curves = [run["curves"]["accuracy"]["qwen"] for run in own]
    assert line["label"] == f"naive, {len(own)} seeds" and line["x"]["steps"] == own[0]["steps"]
    for n, column in enumerate(zip(*curves, strict=True)):
        assert math.isclose(line["y"][n], sum(column) / len(column), rel_tol=1e-12)
        assert (line["low"][n], line["high"][n]) == (min(column), max(column))
    spent = [sum(run["curves"]["trained_answers"][agent][-1] for agent in run["agents"]) for run in own]
    assert math.isclose(line["x"]["trained_answers"][-1], sum(spent) / len(spent), rel_tol=1e-12)


def test_results_that_arrive_are_seen_and_a_wrong_one_is_a_line(tmp_path: Path) -> None:
    runs = map(json.loads, (EVIDENCE / "runs.jsonl").read_text().splitlines())
    run = next(run for run in runs if (run["method"], run["stage"]) == ("sgt", "reported"))
    for seed in (1, 2):
        (tmp_path / f"skills.sgt.lr-0.0004.seed-{seed}.json").write_text(json.dumps(run | {"seed": seed}))
        (study,) = Runs([tmp_path], print).studies.values()
        assert study.shown()["charts"][0]["lines"][0]["label"].endswith(f"{seed} seed{'s' * (seed > 1)}")
    other = run | {"seed": 3, "learning_rate": 0.0002}
    (tmp_path / "skills.sgt.lr-0.0002.seed-3.json").write_text(json.dumps(other))
    names = {"sgt at 0.0002": "1", "sgt at 0.0004": "2"}
    assert {row[0]: row[-1] for row in study.shown()["tables"][0]["rows"]} == names
    for content, why in (
        (run | {"seed": "x"}, "seed is 'x'"),
        (run | {"steps": [0]}, "other lengths"),
        (run | {"agents": ["A"]}, "its agents"),
        ([], "no table"),
        (run | {"curves": {"accuracy": {"A": [math.nan]}}}, "curves.accuracy"),
    ):
        (tmp_path / "skills.sgt.lr-0.0004.seed-3.json").write_text(json.dumps(content))
        with pytest.raises(ValueError, match=why) as error:
            study.shown()
        assert "\n" not in str(error.value) and "seed-3.json" in str(error.value)
    with pytest.raises(ValueError, match="no method 'x'"):
        Study(EVIDENCE, "experiment").shown("x")
    for file in tmp_path.glob("*.json"):
        file.unlink()
    with pytest.raises(ValueError, match="moved or deleted"):
        study.shown()


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
    found = study.shown()
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
        study.shown()


def test_an_evaluation_by_hand(tmp_path: Path) -> None:
    result = BenchmarkResult(
        *("maths", "avg@4", {"avg@4": Estimate(0.5, 0.4, 0.6), "best@4": Estimate(0.75, 0.7, 0.8)}),
        **{"num_problems": 30, "num_dropped": 2, "num_unscored": 0, "num_answers": 120, "num_unjudged": 1},
        **{"no_answer": 0.125, "cut": 0.25, "tokens_mean": 17.4, "graded": True},
    )
    settings = {"model": "models/qwen", "num_answers": 4}
    out = tmp_path / "run" / "evaluations" / "end"
    out.mkdir(parents=True)
    (tmp_path / "run" / "metrics.jsonl").touch()
    write_evaluation(Evaluation(settings, (result, result), Estimate(0.5, math.nan, math.nan)), out)
    (study,) = studies_in(tmp_path / "run")
    found = study.shown()
    assert found["facts"] == {"model": "models/qwen", "num_answers": "4"}
    assert found["tables"][0]["rows"][1:] == [
        ["maths", "30", "mean reward@4 0.5000", "0.4000 to 0.6000", "best reward@4 0.7500", "12.5%", "25.0%", "17"],
        ["mean", "", "0.5000", "– to –", "", "", "", ""],
    ]
    assert found["tables"][0]["notes"][0] == "maths: 2 problems over the prompt limit were not asked."
    lines = [
        Answer("q1", n, n, "2+2=", "4", f"it is {n}", str(n), "correct" if n == 4 else "wrong", float(n == 4), "eos", 5)
        for n in range(30)
    ]
    file = AnswerFile(out, "maths", 0)
    file.append(lines)
    file.close()
    (right,) = study.answers("maths", "correct", "", 0)["rows"]
    assert (right["text"], right["gold"], right["reward"]) == ("it is 4", "4", 1.0)
    found = study.answers("maths", "", "IT IS 2", 0)
    assert [row["rollout"] for row in found["rows"]] == [2, *range(20, 30)] and found["total"] == 11
    assert [row["rollout"] for row in study.answers("maths", "", "", 1)["rows"]] == list(range(20, 30))
    with pytest.raises(ValueError, match=r"no benchmark 'x' in .*: give one of maths"):
        study.answers("x", "", "", 0)
    (out / "evaluation.json").write_text('{"settings": {}, "benchmarks": [{"name": 3}], "average": {}}')
    with pytest.raises(ValueError, match=r"evaluation.json is no evaluation: (?!.*\n)"):
        study.shown()


def test_evaluations_lie_side_by_side(tmp_path: Path) -> None:
    for model, benchmarks in (("qwen", ("maths", "code")), ("llama", ("maths",))):
        results = [
            BenchmarkResult(
                *(name, "avg@4", {"avg@4": Estimate(0.5, 0.4, 0.6)}, 30, 0, 0, 120, 0),
                **{"no_answer": 0.0, "cut": 0.0, "tokens_mean": 1.0},
            )
            for name in benchmarks
        ]
        out = tmp_path / model / "evaluations" / "end"
        out.mkdir(parents=True)
        (tmp_path / model / "metrics.jsonl").touch()
        write_evaluation(Evaluation({"model": f"models/{model}"}, tuple(results), Estimate(0.5, 0.4, 0.6)), out)
    (study,) = [study for study in Runs([tmp_path], print).studies.values() if study.kind == "evaluations"]
    (table,) = study.shown()["tables"]
    assert table["head"] == ["evaluation", "model", "maths", "code", "mean"]
    score = "avg@4 0.5000 [0.4000, 0.6000]"
    assert table["rows"] == [
        ["llama/end", "models/llama", score, "–", ""],
        ["qwen/end", "models/qwen", score, score, "0.5000"],
    ]
    (tmp_path / "llama" / "evaluations" / "end" / "evaluation.json").write_text("[]")
    found = study.shown()
    assert [row[0] for row in found["tables"][0]["rows"]] == ["qwen/end"]
    assert len(found["notes"]) == 1 and "is no evaluation: no table" in found["notes"][0]
    assert not list(Runs([tmp_path / "qwen"], print).studies.values())[1:], "one evaluation has nothing beside it"


def test_a_folder_of_none_of_these_is_a_line(tmp_path: Path) -> None:
    (tmp_path / "runs.jsonl").write_text('{"anything": 1}\n')
    (tmp_path / "notes.json").write_text("{}")
    assert not list(kinds_of(tmp_path))
    with pytest.raises(ValueError, match="holds no run, and nothing of experiment, bench or eval: give") as error:
        Runs([tmp_path], print)
    assert "\n" not in str(error.value)
