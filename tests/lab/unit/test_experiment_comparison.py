"""Mean, deviation, paired bootstrap interval against hand calculations and the exact distribution; tables of them."""

import itertools
import json
import math

import numpy as np
import pytest
from experiment_cases import make_grid, make_result
from scipy import stats

from hacpo_lab.experiments.comparison import (
    NUM_CROSSED,
    Ends,
    Summary,
    bootstrap_interval,
    crossed_interval,
    paired_difference,
    summarize,
)
from hacpo_lab.experiments.evidence import as_table, evidence_of
from hacpo_lab.experiments.final_answers import FinalAnswers
from hacpo_lab.experiments.grid import Cell
from hacpo_lab.experiments.page import write_evidence
from hacpo_lab.experiments.result import Diagnosis, write_result
from hacpo_lab.experiments.table import to_markdown
from hacpo_mega.watch.runs import studies_in


def test_mean_and_sample_deviation_by_hand():
    """.2, .4, .9 have mean .5; squares .09 + .01 + .16 = .26, over n - 1 = 2: .13."""
    found = summarize([0.2, 0.4, 0.9])
    assert (found.mean, found.sd, found.n) == (pytest.approx(0.5), pytest.approx(math.sqrt(0.13)), 3)
    assert summarize([0.7]) == Summary(0.7, None, 1)


def test_differences_are_paired_by_seed():
    """Seeds 1, 2, 3 are common: +.1, -.2, +.4, mean .1; seed 9 has no partner."""
    found = paired_difference(Ends({1: 0.6, 2: 0.3, 3: 0.9, 9: 5.0}), Ends({3: 0.5, 2: 0.5, 1: 0.5, 8: 0.0}))
    assert found.mean == pytest.approx(0.1)
    assert (found.n, found.num_positive) == (3, 2)
    # One of 27 resamples (3.7 %) is all -.2 and one all +.4: both quantiles of 2.5 % lie inside these steps.
    assert found.interval == pytest.approx((-0.2, 0.4))


def test_a_seed_of_as_many_right_answers_is_not_positive():
    """Means of (.1, .2) and (.15, .15), and of 16 and 16 or 8 and 24 of 48 right answers, kept to six digits."""
    ends, reference = Ends({1: (0.1 + 0.2) / 2, 2: (0.166667 + 0.5) / 2}), Ends({1: 0.15, 2: (0.333333 + 0.333333) / 2})
    assert paired_difference(ends, reference).num_positive == paired_difference(reference, ends).num_positive == 0


def test_fewer_than_three_pairs_have_no_interval_and_none_no_difference():
    assert paired_difference(Ends({1: 0.6, 2: 0.3}), Ends({1: 0.5, 2: 0.5})).interval is None
    assert paired_difference(Ends({1: 0.6}), Ends({2: 0.5})) is None


def test_an_interval_over_seeds_and_prompts_is_that_of_all_their_resamples():
    """Two seeds, a skill of two prompts and one of three: 4 x 4 x 27 resamples, each as likely as another."""
    rng = np.random.default_rng(5)
    differences = [[rng.integers(-1, 2, 2).astype(float), rng.integers(-1, 2, 3).astype(float)] for _ in range(2)]
    means = []
    for seeds in itertools.product(range(2), repeat=2):
        for two in itertools.product(range(2), repeat=2):
            for three in itertools.product(range(3), repeat=3):
                chosen = [
                    (differences[s][0][list(two)].mean() + differences[s][1][list(three)].mean()) / 2 for s in seeds
                ]
                means.append(np.mean(chosen))
    low, high = crossed_interval(differences, 0.8)
    slack = 5 * math.sqrt(0.1 * 0.9 / NUM_CROSSED)
    assert np.quantile(means, 0.1 - slack) - 1e-12 <= low <= np.quantile(means, 0.1 + slack) + 1e-12
    assert np.quantile(means, 0.9 - slack) - 1e-12 <= high <= np.quantile(means, 0.9 + slack) + 1e-12
    assert crossed_interval(differences, 0.8) == (low, high)


def test_prompts_of_each_skill_are_resampled_by_themselves():
    """Prompt by prompt one skill gains what the other loses: drawn together, every resample has the mean 0."""
    of_skill = np.tile([1.0, -1.0], 32)
    low, high = crossed_interval([[of_skill, -of_skill]] * 3, 0.95)
    deviation = math.sqrt(2 / 64) / 2  # of the mean of two means of 64 prompts, each of variance 1
    assert (-low, high) == pytest.approx((1.96 * deviation, 1.96 * deviation), rel=0.1)


def test_an_interval_over_seeds_and_prompts_holds_what_it_promises():
    """400 made-up experiments of 16 seeds and two skills whose true difference is .02, with a difficulty that a prompt
    keeps for all seeds and one that a seed has for all prompts: 95 % intervals hold .02 in 90 to 99 % of them.

    The percentile bootstrap of 16 seeds is a little narrow, the crossed one a little wide; 400 have an error of .011.
    The interval of seeds alone, which ignores which prompts were asked, holds it much more seldom.
    """
    rng = np.random.default_rng(0)
    held = {"crossed": 0, "seeds": 0}
    for _ in range(400):
        differences = []
        prompts = [rng.normal(0.0, 0.3, size) for size in (60, 30)]
        for _ in range(16):
            seed = rng.normal(0.0, 0.02)
            chances = [np.clip(0.02 + seed + effect, -1.0, 1.0) for effect in prompts]
            differences.append([np.sign(mean) * (rng.random(len(mean)) < abs(mean)) for mean in chances])
        low, high = crossed_interval(differences, 0.95)
        held["crossed"] += low <= 0.02 <= high
        low, high = bootstrap_interval([np.mean([skill.mean() for skill in seed]) for seed in differences])
        held["seeds"] += low <= 0.02 <= high
    assert 0.90 <= held["crossed"] / 400 <= 0.99 and held["seeds"] / 400 < 0.7, held


@pytest.mark.parametrize(
    "values", [(0.02, -0.01, 0.05, 0.03), (0.1, 0.11, 0.4, -0.3, 0.02), (1.0, 2.0, 4.0, 8.0, 16.0)]
)
def test_interval_is_that_of_the_exact_bootstrap_distribution(values):
    """All n^n resamples, weighed alike: what 10,000 random ones estimate.

    A quantile found by N draws lies between the exact ones at p -+ z sqrt(p (1 - p) / N); z = 5 fails once in 10^6.
    """
    means = np.array([np.mean(resample) for resample in itertools.product(values, repeat=len(values))])
    low, high = bootstrap_interval(values)
    slack = 5 * math.sqrt(0.025 * 0.975 / 10_000)
    rounding = 1e-12
    assert np.quantile(means, 0.025 - slack) - rounding <= low <= np.quantile(means, 0.025 + slack) + rounding
    assert np.quantile(means, 0.975 - slack) - rounding <= high <= np.quantile(means, 0.975 + slack) + rounding
    assert bootstrap_interval(values) == (low, high), "the same numbers give the same interval"
    how = {"n_resamples": 10_000, "method": "percentile", "rng": np.random.default_rng(0)}
    assert tuple(stats.bootstrap((values,), np.mean, **how).confidence_interval) == pytest.approx((low, high))


def finished(tmp_path):
    """A whole grid: alone .5, .6, .7 for A; shared .1 more; B always .8; the ablation cut .5 on two seeds."""
    grid = make_grid(tmp_path)
    results = {}
    for method in ("alone", "shared"):
        for rate, seed in itertools.product((2e-4, 4e-4), (11, 12)):
            cell = Cell("skills", method, rate, seed, "tuning")
            results[cell] = make_result(cell, (0.5 + 100 * rate, 0.8))
    for seed in (1, 2, 3):
        for method, more in (("alone", 0.0), ("shared", 0.1)):
            cell = Cell("skills", method, 4e-4, seed, "reported")
            results[cell] = make_result(cell, (0.4 + seed / 10 + more, 0.8))
    for seed in (1, 2):
        cell = Cell("skills", "cut", 4e-4, seed, "reported")
        results[cell] = make_result(cell, (0.5, 0.8))
    return grid, results


def test_the_evidence_of_a_whole_grid_by_hand(tmp_path):
    regime = evidence_of(*finished(tmp_path))["skills"]
    shared, alone, cut = (regime.methods[name] for name in ("shared", "alone", "cut"))
    assert regime.start == pytest.approx({"A": 0.25, "B": 0.25, "mean": 0.25})
    assert shared.accuracy["A"].mean == pytest.approx(0.7) and shared.accuracy["A"].sd == pytest.approx(0.1)
    assert shared.accuracy["mean"].mean == pytest.approx(0.75)
    assert alone.difference == {}, "the reference is not compared with itself"
    assert shared.difference["A"].interval == pytest.approx((0.1, 0.1))
    assert shared.difference["B"].num_positive == 0
    assert (cut.difference["A"].mean, cut.difference["A"].interval) == (pytest.approx(-0.05), None)
    assert cut.ablation["A"].mean == pytest.approx(-0.15) and cut.ablation["A"].num_positive == 0
    assert shared.ablation == {}, "it is tuned itself"
    assert shared.generated_answers == (0, 2000) and shared.trained_answers == ()
    assert shared.curves["A"].sd == pytest.approx((0.0, 0.1))


def test_the_table_says_what_it_rests_on_and_what_is_missing(tmp_path):
    grid, results = finished(tmp_path)
    text = to_markdown(grid, evidence_of(grid, results), len(results), 0)
    assert "| shared | 0.0004 | 0.700 ± 0.100 | 0.800 ± 0.000 | 0.750 ± 0.050 | 3 |  |" in text
    assert (
        "| shared | +0.100 [+0.100, +0.100] 3/3 | +0.000 [+0.000, +0.000] 0/3 | +0.050 [+0.050, +0.050] 3/3 | 3 |"
        in text
    )
    assert "| cut | -0.050 0/2 | +0.000 0/2 | -0.025 0/2 | 2 |" in text
    assert "Fewer than 3 common seeds: no interval is given." in text
    assert "shared: 0.0004 is the highest rate that was tried" in text and "cut: 0.0004 is" not in text
    assert "| shared | 0.660 | **0.670** |" in text
    assert "16 runs." in text and "a processor, 2 cores" in text and "a" * 40 in text


def test_the_table_names_the_seeds_of_every_set_of_warm_starts(tmp_path):
    grid, results = finished(tmp_path)
    assert "- warm starts: A start, B start (seeds 1, 2, 3)" in to_markdown(grid, evidence_of(grid, results), 16, 0)
    for cell, result in results.items():
        if cell.seed == 2:
            other = result.identity.model_copy(update={"models": {"A": "x", "B": "y"}})
            results[cell] = result.model_copy(update={"identity": other})
    text = to_markdown(grid, evidence_of(grid, results), 16, 0)
    assert "- warm starts: A start, B start (seeds 1, 3); A x, B y (seed 2)" in text
    assert "The seeds began from 2 sets of warm starts" in text


def test_the_start_counts_every_seed_once_whatever_ran_of_it(tmp_path):
    """Seed 3, of which the ablation did not run, began at .55 and the others at .25."""
    grid, results = finished(tmp_path)
    for cell, result in results.items():
        if cell.seed == 3:
            curves = result.curves.model_copy(update={"accuracy": {"A": (0.55, 0.7), "B": (0.25, 0.8)}})
            results[cell] = result.model_copy(update={"curves": curves})
    start = evidence_of(grid, results)["skills"].start
    assert start == pytest.approx({"A": 0.35, "B": 0.25, "mean": 0.3})


def test_tables_of_graded_rewards_name_no_accuracy(tmp_path):
    grid, results = finished(tmp_path)
    assert "### skills: accuracy" in to_markdown(grid, evidence_of(grid, results), 16, 0)
    for cell, result in results.items():
        curves = result.curves.model_copy(update={"is_graded": True})
        results[cell] = result.model_copy(update={"curves": curves})
    text = to_markdown(grid, evidence_of(grid, results), 16, 0)
    assert "### skills: mean reward" in text and "accuracy" not in text.lower()
    write_evidence(grid, results)
    (study,) = studies_in(grid.work_dir)
    shown = study.content()
    titles = ["skills: mean reward", "skills: difference to alone", "skills: cost of a run"]
    assert [table["title"] for table in shown["tables"]] == titles
    assert shown["charts"][0]["note"] == "Mean reward on held-out prompts, mean over seeds."
    assert "accuracy" not in json.dumps(shown).lower()
    assert "Mean reward of all agents at the end of a run, over the tuning seeds" in text


def test_a_skill_without_a_judged_answer_is_left_out_and_named(tmp_path):
    """The first run of shared has none, and the ablation has none at all."""
    grid, results = finished(tmp_path)
    for cell, result in results.items():
        if cell.method == "alone" or (cell.method, cell.seed) in (("shared", 2), ("shared", 3)):
            skills = {"A": {"add": (0.25, cell.seed / 10)}}
            curves = result.curves.model_copy(update={"accuracy_by_skill": skills})
            results[cell] = result.model_copy(update={"curves": curves})
    text = to_markdown(grid, evidence_of(grid, results), 16, 0).partition("accuracy by skill")[2]
    assert "| alone | 0.200 ± 0.100 |\n| shared | 0.250 ± 0.071 |\n| cut | – |" in text
    assert "shared, A add: without the 1 runs of which an evaluation judged no answer." in text
    assert "cut, A add: without the 2 runs" in text and "alone, A add" not in text


def test_evidence_does_not_depend_on_the_order_of_the_runs(tmp_path):
    grid, results = finished(tmp_path)
    turned = dict(reversed(results.items()))
    assert json.dumps(as_table(grid, turned)) == json.dumps(as_table(grid, results))


def test_an_unfinished_grid_shows_what_it_has(tmp_path):
    grid, results = finished(tmp_path)
    assert evidence_of(grid, {}) == {}
    some = {cell: result for cell, result in results.items() if cell.stage == "tuning" or cell.method == "shared"}
    regime = evidence_of(grid, some)["skills"]
    assert list(regime.methods) == ["shared"] and regime.methods["shared"].difference == {}
    assert as_table(grid, some)["num_missing"] == 5
    files = write_evidence(grid, some)
    assert {file.name for file in files} >= {"evidence.json", "evidence.md", "report.html", "skills-steps.png"}
    assert not [file for file in files if "trained" in file.name], "nobody counted trained answers"


def test_the_page_of_watch_reads_the_evidence(tmp_path):
    """The work folder has its reference and its numbers; the results alone have the same, compared with that method."""
    grid, results = finished(tmp_path)
    write_evidence(grid, results)
    for result in results.values():
        write_result(tmp_path / "few", result)
    (of_work,) = studies_in(grid.work_dir)
    (of_results,) = studies_in(tmp_path / "few")
    assert of_work.content()["reference"] == "alone"
    tables, of_few = (
        {table["title"]: sorted(table["rows"]) for table in study.content("alone")["tables"]}
        for study in (of_work, of_results)
    )
    assert tables == of_few
    shared = next(row for row in tables["skills: difference to alone"] if row[0] == "shared")
    assert shared == ["shared", "+0.100 [+0.100, +0.100] 3/3", "+0.000 [+0.000, +0.000] 0/3", *shared[3:]]
    assert ["cut", "0.0004", "0.500 ± 0.000", "0.800 ± 0.000", "0.650 ± 0.000", "2"] in tables["skills: accuracy"]


def test_the_page_of_watch_has_the_numbers_of_the_test_set(tmp_path):
    grid, results = finished(tmp_path)
    rng = np.random.default_rng(3)

    def some(size):
        return np.packbits(rng.integers(0, 2, size)).tobytes().hex()

    for cell, result in results.items():
        if cell.stage == "reported":
            answers = [{name: {"add": some(13), "sub": some(64)} for name in "AB"} for _ in range(2)]
            numbers = {"add": 13, "sub": 64}
            final = FinalAnswers(prompts="digest", num_prompts=numbers, greedy=answers[0], sampled=answers[1])
            results[cell] = result.model_copy(update={"final": final})
    text = to_markdown(grid, evidence_of(grid, results), len(results), 0)
    for result in results.values():
        write_result(tmp_path / "few", result)
    (study,) = studies_in(tmp_path / "few")
    tables = study.content("alone")["tables"]
    assert [table["title"] for table in tables] == [
        "skills: accuracy",
        "skills: difference to alone",
        "skills: accuracy by skill",
        "skills: cost of a run",
    ]
    for table in tables:
        for row in table["rows"]:
            assert f"| {' | '.join(row)} |" in text, (table["title"], row)
    assert tables[0]["head"][-2] == "mean, sampled" and "97.5% percentile" in tables[1]["notes"][0]
    final = results[Cell("skills", "shared", 4e-4, 1, "reported")].final.model_dump(mode="json")
    file = tmp_path / "few" / "skills.shared.lr-0.0004.seed-1.json"
    run = json.loads(file.read_text())
    for wrong, why in (
        ({"greedy": {"A": final["greedy"]["A"]}}, "the agents of its final answers"),
        ({"num_prompts": {"add": 13, "sub": 65}}, "not as many as its prompts"),
        ({"sampled": {"A": {"add": "xy"}}}, "final.sampled.A.add: String should match"),
        ({"prompts": "other"}, "have answered other test sets"),
    ):
        file.write_text(json.dumps(run | {"final": final | wrong}))
        with pytest.raises(ValueError, match=why):
            study.content("alone")


def test_a_reported_run_at_a_rate_that_is_not_the_tuned_one_is_not_shown(tmp_path):
    """After a rate was added to the grid, another may win; the runs at the old one stay on disk, unused."""
    grid, results = finished(tmp_path)
    cell = Cell("skills", "shared", 2e-4, 1, "reported")
    more = results | {cell: make_result(cell, (0.99, 0.99))}
    assert evidence_of(grid, more) == evidence_of(grid, results)


def test_what_others_answers_did_is_averaged_over_steps_and_seeds(tmp_path):
    """Twelve steps are a window of ten and one of two, which counts a fifth of it."""
    grid, results = finished(tmp_path)
    metrics = {"agent/A/from/B/grad_share": ((0.2, 0.4), (None, 0.9)), "omega/A/B": ((1.0, 1.0), (2.0, 3.0))}
    metrics |= {"omega/B/A": ((1.0, 1.0), (1.0, 1.0))}  # B has learnt from nobody: there is a coefficient all the same
    for number, seed in enumerate((1, 2)):
        cell = Cell("skills", "cut", 4e-4, seed, "reported")
        values = {name: by_seed[number] for name, by_seed in metrics.items()}
        diagnosis = Diagnosis(steps_per_window=10, values=values)
        results[cell] = results[cell].model_copy(update={"diagnosis": diagnosis, "steps": (0, 12)})
    evidence = evidence_of(grid, results)
    cross = evidence["skills"].methods["cut"].cross
    assert cross == {"A/from/B": {"grad_share": pytest.approx(4.6 / 14), "omega": pytest.approx(38 / 24)}}
    assert "| cut | A from B | 0.329 | – | – | – | – | – | – | – | 1.583 |" in to_markdown(grid, evidence, 16, 0)
