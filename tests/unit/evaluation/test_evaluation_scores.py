"""Scores of an evaluation: statistics against enumeration, benchmarks and what counts as an answer to them."""

import itertools
import json
import math
from pathlib import Path

import pytest
from judged import questions
from repository import SHARED

from hacpo_grading.graders.registry import final_answer
from hacpo_grading.judge import Judge
from hacpo_mega.evaluation.answers import Answer, AnswerFile
from hacpo_mega.evaluation.benchmarks import (
    PAPER_SUITE,
    Benchmark,
    find_suite,
    load_benchmarks,
    load_suite,
    names_of,
    read_rows,
)
from hacpo_mega.evaluation.table import (
    Answers,
    average,
    best,
    majority,
    mean_of_benchmarks,
    over_problems,
    pass_at,
    print_table,
    summarize,
)
from hacpo_mega.logbook.evaluation_file import Evaluation
from hacpo_mega.records import Stop

REAL = SHARED / "data"


def answers(correct: str, votes: str | None = None) -> Answers:
    """One character per answer: correct is 1 or 0, a vote is any letter, and a dot is none."""
    texts = votes or "a" * len(correct)
    right = tuple(c == "1" for c in correct)
    return Answers(tuple(map(float, right)), right, tuple(None if v == "." else v for v in texts))


@pytest.mark.parametrize("correct", ["0000", "1000", "0110", "10101", "111111", "0000001"])
def test_pass_at_k_is_the_share_of_subsets_with_a_correct_answer(correct):
    for k in range(1, len(correct) + 1):
        drawn = list(itertools.combinations(correct, k))
        exact = sum("1" in subset for subset in drawn) / len(drawn)
        assert pass_at(k, answers(correct)) == pytest.approx(exact, abs=1e-12)
    assert pass_at(1, answers(correct)) == pytest.approx(average(answers(correct)))
    assert pass_at(len(correct), answers(correct)) == best(answers(correct))


def test_pass_at_k_needs_k_answers():
    with pytest.raises(ValueError, match="pass@5 needs at least 5 judged answers to a problem, found 4"):
        pass_at(5, answers("1010"))


@pytest.mark.parametrize(
    ("correct", "votes", "expected"),
    [
        ("110", "aab", 1.0),
        ("100", "abb", 0.0),
        ("100", "abc", 1 / 3),  # three candidates with a vote each
        ("1100", "abcc", 1 / 2),  # 1/2 and 0.5 are one candidate when both are correct
        ("1000", "a...", 1.0),  # no answer is no vote
        ("000", "...", 0.0),
        ("10", ".b", 1 / 2),  # correct without a text of its own
    ],
)
def test_majority(correct, votes, expected):
    assert majority(answers(correct, votes)) == pytest.approx(expected)


def test_the_interval_is_that_of_the_binomial():
    """Resampling 100 problems of which 30 are solved draws Binomial(100, 0.3): its quantiles are known."""
    estimate = over_problems([1.0] * 30 + [0.0] * 70, seed=3)
    cumulative = list(itertools.accumulate(math.comb(100, n) * 0.3**n * 0.7 ** (100 - n) for n in range(101)))
    low, high = (next(n for n, share in enumerate(cumulative) if share >= q) / 100 for q in (0.025, 0.975))
    assert estimate.value == pytest.approx(0.3)
    assert (estimate.low, estimate.high) == pytest.approx((low, high), abs=0.0101)  # one problem more or less
    assert over_problems([1.0] * 30 + [0.0] * 70, seed=3) == estimate
    assert over_problems([0.5], seed=3).low == over_problems([0.5], seed=3).high == 0.5
    assert math.isnan(over_problems([]).value)


def test_a_small_benchmark_weighs_as_much_as_a_large_one():
    """The mean of two benchmarks with variances v of their means has variance (v1 + v2) / 4."""
    small, large = [1.0, 0.0, 0.0, 0.0] * 5, [1.0, 1.0, 1.0, 0.0] * 250
    estimate = mean_of_benchmarks([small, large], seed=1)
    assert estimate.value == pytest.approx((0.25 + 0.75) / 2)
    spread = math.sqrt((0.25 * 0.75 / 20 + 0.25 * 0.75 / 1000) / 4)
    assert estimate.high - estimate.low == pytest.approx(2 * 1.96 * spread, rel=0.1)


def test_votes():
    assert final_answer("math", r"so \boxed{\dfrac{1}{2}} and not \boxed{ 7 }.") == "7"
    thought = r"<think>\boxed{3}</think>\boxed{ \frac{1}{2}}"
    assert final_answer("math", r"$\boxed{\dfrac{1}{2}}$") == final_answer("math", thought) == r"\frac{1}{2}"
    assert final_answer("math", "no box") is None
    assert final_answer("arithmetic", "1+1=2;2") == "2"
    assert final_answer("exact", "  seven ") == "seven"


def test_benchmarks_are_named_as_shortly_as_possible(tmp_path):
    assert names_of([Path("data/math500.jsonl"), Path("data/amc23.parquet")]) == ("math500", "amc23")
    assert names_of([Path("data/math500/test.jsonl")]) == ("math500_test",)
    assert names_of([Path("a/x.jsonl"), Path("b/x.jsonl")]) == ("a_x", "b_x")
    with pytest.raises(ValueError, match="given twice"):
        names_of([Path("a/x.jsonl"), Path("a/../a/x.jsonl")])


def test_a_repeated_problem_counts_once(tmp_path):
    file = tmp_path / "b.jsonl"
    rows = ['{"prompt": "1+1", "answer": "2"}', '{"prompt": "half", "answer": "\\\\dfrac12", "level": 3}']
    file.write_text("".join(f"{row}\n" for row in [*rows, *rows, rows[0], rows[1].replace("dfrac", "frac")]))
    read = read_rows(file)
    assert [row.text for row in read.rows] == ["1+1", "half"] and read.num_repeated == 4
    (benchmark,) = load_benchmarks([file], 1, 0.0, limit=2)
    assert (len(benchmark.rows), benchmark.num_repeated) == (2, 4)
    file.write_text('{"prompt": "1+1", "answer": "2"}\n{"prompt": "1+1"\n')
    with pytest.raises(ValueError, match=r"b\.jsonl:2: invalid JSON"):
        read_rows(file)


@pytest.mark.parametrize("prompt_field", ["problem", "prompt", "question"])
def test_a_gold_that_is_text_stays_as_it_is(prompt_field, tmp_path):
    """Zeros belong to a sorted row of digits; a judge of numbers takes 25 for 025 of itself."""
    golds = ["0007", "025", 27.0]
    file = tmp_path / "b.jsonl"
    file.write_text("".join(json.dumps({prompt_field: str(n), "answer": gold}) + "\n" for n, gold in enumerate(golds)))
    (benchmark,) = load_benchmarks([file], 1, 0.0)
    assert [row.gold for row in benchmark.rows] == ["0007", "025", "27"]
    for kind, answers, rewards in (
        ("exact", ("0007", "7"), [1.0, 0.0]),
        ("arithmetic", ("s7000=7000;0007", "s7000=7000;7"), [1.0, 0.0]),
        ("number", ("0007", "7"), [1.0, 1.0]),
    ):
        with Judge(kind) as judge:
            asked = questions(["s7000="] * 2, [benchmark.rows[0].gold] * 2, answers, [Stop.EOS] * 2)
            assert [found.reward for found in judge.judge(asked)] == rewards, kind


def test_two_golds_of_one_problem_are_refused_with_their_lines(tmp_path):
    file = tmp_path / "b.jsonl"
    golds = [("1+1", "2"), ("1+2", "3"), ("1+1", "3"), ("1+2", "3"), ("1+2", "12")]
    file.write_text("".join(json.dumps({"prompt": prompt, "answer": gold}) + "\n" for prompt, gold in golds))
    with pytest.raises(ValueError, match=r".") as error:
        read_rows(file)
    assert str(error.value).splitlines() == [
        f"{file}:3: has the problem of {file}:1 again, with another gold ('3' here, '2' there); keep one of them",
        f"{file}:5: has the problem of {file}:2 again, with another gold ('12' here, '3' there); keep one of them",
    ]
    (tmp_path / "folder").mkdir()
    file.rename(tmp_path / "folder" / "b.jsonl")
    with pytest.raises(
        ValueError, match=rf"{tmp_path}/folder/b\.jsonl:3: has the problem of {tmp_path}/folder/b\.jsonl:1"
    ):
        read_rows(tmp_path / "folder")


def evaluated(folder: Path, rewards: list[list[float]], least: float, **settings) -> Evaluation:
    """The evaluation of these rewards; an answer is correct from `least` on, and votes for its reward."""
    benchmark = Benchmark("b", (), len(rewards[0]), 1.0, num_repeated=settings.pop("num_repeated", 0))
    file = AnswerFile(folder, "b", 0)
    for problem, group in enumerate(rewards):
        verdicts = ("correct" if reward >= least else "wrong" for reward in group)
        pairs = enumerate(zip(group, verdicts, strict=True))
        file.append(Answer(str(problem), i, 0, "", "", "", f"{r:g}", v, r, "eos", 9) for i, (r, v) in pairs)
    file.close()
    return summarize({"model": "m", **settings}, [benchmark], {"b": 0}, folder, 0)


GRADED_REWARDS = [[0.9, 0.7, 0.1, 0.1], [0.8, 0.2, 0.2, 0.3], [0.1, 0.1, 0.1, 0.1]]


def test_scores_of_graded_rewards_are_called_what_they_are(tmp_path, capsys):
    """.8 right, .2 brevity: two problems have an answer that is right, one of them two."""
    evaluation = evaluated(tmp_path, GRADED_REWARDS, 0.7, reward_success="right", num_repeated=6)
    (found,) = evaluation.benchmarks
    assert found.graded and found.headline == "avg@4"
    scores = {name: score.value for name, score in found.scores.items()}
    wanted = {"avg@4": 3.7 / 12, "best@4": 1.8 / 3, "maj@4": (1 / 2 + 0) / 3}
    # two of four and one of four are right: pass@2 is 1 - 1/6, and 1 - 3/6
    wanted |= {"pass@1": 3 / 12, "pass@2": (5 / 6 + 1 / 2) / 3, "pass@4": 2 / 3}
    assert scores == pytest.approx(wanted, abs=1e-12) and list(scores) == list(wanted)
    print_table(evaluation)
    said = capsys.readouterr().out
    assert "mean reward@4 0.3083" in said and "best reward@4 0.6000, maj@4 0.1667, pass@1 0.2500 " in said
    assert "pass@2 0.4444, pass@4 0.6667 " in said and "avg@" not in said
    assert "b: pass@k and maj@k count successes, answers with the full reward of the part 'right'\n" in said
    assert "b: 6 rows repeat a problem of the file (same text, same gold); each problem counts once\n" in said


def test_what_cannot_be_measured_is_absent(tmp_path, capsys):
    """No answer can have the full reward, or so it seems: nothing is said of how many would be right."""
    evaluation = evaluated(tmp_path / "unsaid", GRADED_REWARDS, 1.0)
    assert list(evaluation.benchmarks[0].scores) == ["avg@4", "best@4"]
    print_table(evaluation)
    said = capsys.readouterr().out
    assert (
        "b: no answer has the full reward of 1, and nothing else says which are a success: pass@k and maj@k are" in said
    )
    said_so = evaluated(tmp_path / "said", GRADED_REWARDS, 1.0, reward_success=1.0).benchmarks[0].scores
    assert said_so["pass@2"].value == said_so["maj@4"].value == 0.0
    one_full = evaluated(tmp_path / "full", [[1.0, 0.2], [0.2, 0.2]], 1.0).benchmarks[0].scores
    assert one_full["pass@2"].value == 0.5 and one_full["avg@2"].value == pytest.approx(0.4)
    nothing = evaluated(tmp_path / "nothing", [[0.0, 0.0], [0.0, 0.0]], 1.0).benchmarks[0].scores
    assert list(nothing) == ["avg@2", "best@2", "maj@2"] and nothing["avg@2"].value == 0.0


def test_an_interval_without_width_says_of_how_many(tmp_path, capsys):
    for number, shown in ((3, "all 3 equal"), (1, "1 problem")):
        print_table(evaluated(tmp_path / str(number), [[0.9]] * number, 1.0))
        said = capsys.readouterr().out
        assert shown in said and "0.9000 to 0.9000" not in said


def test_a_suite_names_all_files_that_are_missing(tmp_path):
    (tmp_path / "gsm8k").mkdir()
    (tmp_path / "gsm8k" / "test.jsonl").write_text("")
    (tmp_path / "amc23.parquet").write_bytes(b"")
    with pytest.raises(ValueError, match="lacks 5 of 7 benchmarks") as error:
        find_suite(PAPER_SUITE, tmp_path)
    assert "gsm8k" not in str(error.value) and "olympiadbench: none of" in str(error.value)


@pytest.mark.nightly
def test_only_physical_quantities_of_minerva_may_be_rounded():
    tolerances = {one.name: one.relative for one, _ in PAPER_SUITE if one.relative}
    assert tolerances == {"minerva_math": 1e-5}
    answers = [r"\boxed{4.50003 \times 10^{33}}", r"\boxed{4.501e33}"]
    with Judge("math", options={"relative": tolerances["minerva_math"]}) as tolerant, Judge("math") as exact:
        asked = (["?"] * 2, ["4.5e33"] * 2, answers, [Stop.EOS] * 2)
        assert [judgement.reward for judgement in tolerant.judge(questions(*asked))] == [1.0, 0.0]
        assert [judgement.reward for judgement in exact.judge(questions(*asked))] == [0.0, 0.0]


def test_the_suite_is_the_papers():
    by_score = {one.name: (one.headline, one.num_answers) for one, _ in PAPER_SUITE}
    assert by_score.pop("aime25") == ("best", 30)
    assert set(by_score.values()) == {("avg", 1)} and len(by_score) == 6


@pytest.mark.nightly
@pytest.mark.skipif(not REAL.is_dir(), reason=f"the public benchmarks are not in {REAL}")
def test_the_suite_reads_the_public_files():
    sizes = {benchmark.name: len(benchmark.rows) for benchmark in load_suite(PAPER_SUITE, REAL)}
    assert sizes == {
        "math500": 500,
        "math": 5000,
        "gsm8k": 1319,
        "aime25": 30,
        "amc23": 40,
        "minerva_math": 272,
        "olympiadbench": 675,
    }
