"""The judge on public cases: labelled pairs of other projects, golds against themselves and rewritten, hostile answers.

Samples with a fixed start, so that they cost seconds; `grading_benchmark.py` runs all of it
(docs/measurements/grading.md).
"""

import functools
import json
from collections.abc import Iterator

import grading_benchmark
import psutil
import pytest
from grading_benchmark import (
    Tally,
    golds_of,
    gsm8k_cases,
    hostile_run,
    labelled,
    labelled_cases,
    mutated,
    plain_math_verify,
)
from hostile_answers import hostile_answers
from judged import questions
from labelled_pairs import same
from repository import SHARED

from hacpo_grading.graders.math_grader import anywhere, boxed
from hacpo_grading.judge import Judge
from hacpo_grading.judgement import Stop, Verdict
from hacpo_mega.data.datasets import read_dataset

pytestmark = pytest.mark.nightly

REAL = SHARED / "data"
real = pytest.mark.skipif(not REAL.is_dir(), reason=f"real mathematics files are not in {REAL}")
GSM8K_SOLUTIONS = REAL / "gsm8k/example_model_solutions.jsonl"
CASES = REAL / "grader_cases.jsonl"

# why a labelled pair is judged otherwise here, by (source, gold, answer)
LETTERS = "a letter of a multiple choice in a sentence; the choice judge is for them"
ONE_LINE = "its extraction wants a formula on one line"
KNOWN_DISAGREEMENTS = {
    ("huggingface/lighteval", "B"): LETTERS,
    ("huggingface/lighteval", "D"): LETTERS,
    ("huggingface/lighteval", "(D) Alina"): LETTERS,
    ("huggingface/lighteval", "$9$"): ONE_LINE,
    ("huggingface/Math-Verify", "$9$"): ONE_LINE,
    ("huggingface/Math-Verify", "$x \\in [-2,7]$"): "bounds against a set are refused without an option",
    ("huggingface/Math-Verify", "$1 - \\frac{1}{\\mathrm{e}}$"): "a wrong label: 1 - 1/e is not 1 + 1/e",
    (
        "huggingface/lighteval",
        "\\boxed{ p = 5, q = 2 \\quad \\text{and} \\quad p = 7, q = 2}",
    ): "two solutions in one list",
    ("inclusionAI/AReaL", "the answer is sqrt(2)"): "its grader cannot read sqrt(2)",
    ("THUDM/slime", "\\frac{1}{2}"): "its grader wants a reduced fraction",
    ("hendrycks/math", "4, .1, 2"): "its comparison is of strings, so the order of a list matters",
    ("OpenBMB/OlympiadBench", "\\cos ^{10}(\\frac{\\pi}{10})"): "its problem has a tolerance of 1e-4",
    ("QwenLM/Qwen2.5-Math", "10{,}000"): "a wrong label: 10000 is 10,000",
}


def judge_all(judge, rows):
    prompts, golds, texts = zip(*rows)
    return judge.judge(questions(prompts, golds, texts, [Stop.EOS] * len(rows)))


labelled_pairs = pytest.mark.skipif(not CASES.is_file(), reason=f"the labelled pairs are not at {CASES}")


@pytest.fixture(scope="module")
def graded() -> Iterator[tuple[Tally, Tally]]:
    """Our verdicts on every labelled pair, and math-verify's own.

    One of them, 10^{10^{10^{10}}}, ends for either with its limit of time alone: five times what any other takes.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(grading_benchmark, "limited", functools.partial(grading_benchmark.limited, seconds=3.0))
        cases = labelled_cases(REAL)
        yield labelled(anywhere, cases), labelled(plain_math_verify, cases)


@labelled_pairs
def test_labelled_pairs_of_eleven_projects(graded):
    """Every disagreement is known and has a reason; at least 95 % agree."""
    ours, _ = graded
    assert [example for example in ours.examples if example[:2] not in KNOWN_DISAGREEMENTS] == []
    assert ours.wrong.total() <= 0.05 * ours.total.total()


@labelled_pairs
def test_every_source_is_judged_no_worse_than_by_math_verify_alone(graded):
    ours, alone = graded
    assert [source for source in ours.total if ours.wrong[source] > alone.wrong[source]] == []
    assert alone.wrong.total() - ours.wrong.total() >= 0.01 * ours.total.total()


@labelled_pairs
def test_labels_hold_under_the_options_they_were_given_with():
    cases = [json.loads(line) for line in CASES.open()]
    cases = [case for case in cases if {"precision", "allow_set_relation_comp"} & (case.get("options") or {}).keys()]
    assert len(cases) > 15
    for case in cases:
        reward = same(json.dumps(case["options"]), str(case["pred"]), str(case["gold"]))
        assert (reward == 1.0) == case["equal"], case


@real
def test_rewritten_golds():
    """A fixed sample of golds: no changed digit is accepted, and no other spelling is refused."""
    changed, same_answer = mutated(boxed, golds_of(REAL, 50))
    assert changed.total.total() > 140 and same_answer.total.total() > 220
    assert changed.examples == []
    assert same_answer.examples == []


@pytest.mark.skipif(not GSM8K_SOLUTIONS.is_file(), reason=f"OpenAI's labelled solutions are not at {GSM8K_SOLUTIONS}")
def test_labelled_answers_of_gsm8k():
    tally = labelled(boxed, gsm8k_cases(GSM8K_SOLUTIONS))
    assert tally.total.total() == 5276
    assert tally.examples == []


def test_generated_hostile_answers_run_no_code_and_are_judged_repeatably():
    first, second = hostile_run(50, seed=1), hostile_run(50, seed=1)
    assert first.verdicts == second.verdicts
    assert "CORRECT" not in first.verdicts
    assert not first.ran_code and not second.ran_code
    assert first.peak_bytes < 2 << 30


@real
def test_golds_are_correct_against_themselves_and_solutions_against_golds():
    names = (
        "math/MATH_original_train.tar.gz", "math/MATH_original_test.tar.gz", "math500/test.jsonl", "gsm8k/train.jsonl",
        "gsm8k/test.jsonl", "amc23/test.jsonl", "aime24/qwen_test.jsonl", "aime24/nemo_test.txt",
        "aime25/nemo_test.txt",
        "minerva_math/qwen_test.jsonl", "olympiadbench/test.jsonl",
    )  # fmt: skip
    problems = [p for name in names for p in read_dataset(REAL / name).problems]
    problems = problems[::12]
    rows = [(p.prompt, p.gold, f"Thus $\\boxed{{{p.gold}}}$.") for p in problems]
    rows += [(p.prompt, p.gold, p.solution) for p in problems if "\\boxed" in p.solution]
    with Judge("math", num_workers=2) as judge:
        wrong = [row[1:] for row, j in zip(rows, judge_all(judge, rows)) if j.verdict != Verdict.CORRECT]
    assert len(rows) > 2_900
    assert wrong == []


@real
def test_model_answers_get_the_label_of_their_own_project():
    """800 real answers of a model, graded from their whole text; 99 % must get the label that Qwen's grader gave."""
    cases = [json.loads(line) for line in (REAL / "model_outputs/qwen_math_cot_100.jsonl").open()]
    rows, labels = [], []
    for case in cases:
        responses = case["response"] if isinstance(case["response"], list) else json.loads(case["response"])
        rows += [(case["question"], case["gt"], response) for response in responses]
        labels += case["score"]
    with Judge("math", num_workers=2, timeout_s=30.0) as judge:
        verdicts = [j.verdict for j in judge_all(judge, rows)]
    assert len(labels) == 800
    assert sum((v == Verdict.CORRECT) == label for v, label in zip(verdicts, labels)) >= 0.99 * 800


def test_hostile_answers_end_in_time_with_right_verdicts_and_no_leftovers():
    cases = hostile_answers()
    assert len(cases) >= 200
    before = set(psutil.Process().children())
    with Judge("math", num_workers=2, timeout_s=5.0) as judge:
        verdicts = [j.verdict for j in judge_all(judge, [("", "7", answer) for answer, _ in cases])]
        workers = set(psutil.Process().children()) - before
    wrong = [
        (answer[:60], verdict.name) for (answer, allowed), verdict in zip(cases, verdicts) if verdict not in allowed
    ]
    assert wrong == []
    assert not any(worker.is_running() for worker in workers)
    assert set(psutil.Process().children()) <= before
