"""Benchmarks of a run's agents on its report page, as `hacpo-mega eval` writes them."""

import math
from pathlib import Path

import pytest

from hacpo_mega.logbook.evaluation_file import BenchmarkResult, Estimate, Evaluation, write_evaluation
from hacpo_mega.report.page import render_benchmarks


def write(folder: Path, name: str, **found) -> None:
    scores = {"best@30": Estimate(0.5, 0.25, 0.75), "avg@30": Estimate(0.125, math.nan, math.nan)}
    counts = {"num_problems": 30, "num_dropped": 0, "num_unscored": 0, "num_answers": 900, "num_unjudged": 0}
    found = {"scores": scores, "no_answer": 0.0, "cut": 0.0, "tokens_mean": 9.0} | found
    result = BenchmarkResult(name, "best@30", **counts, **found)
    folder.mkdir(parents=True)
    write_evaluation(Evaluation({"model": name}, (result,), Estimate(0.5, 0.25, 0.75)), folder)


def test_every_evaluation_of_a_run_has_its_rows(tmp_path):
    assert render_benchmarks(tmp_path) is None
    write(tmp_path / "evaluations" / "qwen", "aime<25>")
    write(tmp_path / "evaluations" / "llama", "aime25")
    page = render_benchmarks(tmp_path)
    assert page.index("llama") < page.index("qwen")
    for shown in ("best@30 0.5000", "0.2500 to 0.7500", "avg@30 0.1250", "aime&lt;25&gt;"):
        assert shown in page


def test_graded_rewards_are_called_so(tmp_path):
    write(tmp_path / "evaluations" / "qwen", "brief", graded=True)
    page = render_benchmarks(tmp_path)
    assert "best reward@30 0.5000" in page and "mean reward@30 0.1250" in page and "avg@" not in page


def test_equal_scores_of_all_problems_are_no_interval(tmp_path):
    for name, high in (("flat", 0.9), ("nearly", 0.9001)):
        write(tmp_path / "evaluations" / name, name, scores={"best@30": Estimate(0.9, 0.9, high)})
    page = render_benchmarks(tmp_path)
    assert "all 30 equal" in page and page.index("all 30") < page.index("0.9000 to 0.9001")


def test_a_file_that_is_no_evaluation_is_named(tmp_path):
    broken = tmp_path / "evaluations" / "qwen" / "evaluation.json"
    broken.parent.mkdir(parents=True)
    broken.write_text('{"benchmarks": [{"name": "x"}]}')
    with pytest.raises(ValueError, match=r"qwen/evaluation\.json is no evaluation: (?!.*\n).*; move it away"):
        render_benchmarks(tmp_path)
