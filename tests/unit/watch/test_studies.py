"""Folders of eval in the page: numbers of their own tables, and one line for anything else."""

import math
from pathlib import Path

import pytest

from hacpo_mega.evaluation.answers import Answer, AnswerFile
from hacpo_mega.logbook.evaluation_file import BenchmarkResult, Estimate, Evaluation, write_evaluation
from hacpo_mega.watch.runs import Runs, studies_in
from hacpo_mega.watch.studies import kinds_of


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


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
    found = study.content()
    assert found["facts"] == {"model": "models/qwen", "num_answers": "4"}
    assert found["tables"][0]["rows"][1:] == [
        ["maths", "30", "mean reward@4 0.5000", "0.4000 to 0.6000", "best reward@4 0.7500", "12.5%", "25.0%", "17"],
        ["mean", "", "0.5000", "– to –", "", "", "", ""],
    ]
    assert found["tables"][0]["notes"][1] == "maths: 2 problems dropped, longer than the prompt limit"
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
        study.content()


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
    (table,) = study.content()["tables"]
    assert table["head"] == ["evaluation", "model", "maths", "code", "mean"]
    score = "avg@4 0.5000 [0.4000, 0.6000]"
    assert table["rows"] == [
        ["llama/end", "models/llama", score, "–", ""],
        ["qwen/end", "models/qwen", score, score, "0.5000"],
    ]
    (tmp_path / "llama" / "evaluations" / "end" / "evaluation.json").write_text("[]")
    found = study.content()
    assert [row[0] for row in found["tables"][0]["rows"]] == ["qwen/end"]
    assert len(found["notes"]) == 1 and "is no evaluation: all: Input should be a dict" in found["notes"][0]
    assert not list(Runs([tmp_path / "qwen"], print).studies.values())[1:], "one evaluation has nothing beside it"


def test_a_folder_of_none_of_these_is_a_line(tmp_path: Path) -> None:
    (tmp_path / "runs.jsonl").write_text('{"anything": 1}\n')
    (tmp_path / "notes.json").write_text("{}")
    assert not list(kinds_of(tmp_path))
    with pytest.raises(ValueError, match="holds no run, and nothing of experiment, bench or eval: give") as error:
        Runs([tmp_path], print)
    assert "\n" not in str(error.value)
