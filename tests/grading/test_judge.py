"""The judge: right verdicts, kinds and options that do not exist said at once, equal answers graded once."""

import subprocess
import sys
import threading

import psutil
import pytest
from judged import CASES, FILE, questions, verdicts

from hacpo_grading.graders import math_grader
from hacpo_grading.judge import Judge, judgement_of
from hacpo_grading.judgement import Judgement, Outcome, Stop, Verdict
from hacpo_mega.data.tasks import SKILLS, training_examples


@pytest.fixture
def new_workers():
    """The workers started since the test began: another judge of this process may have its own."""
    before = set(psutil.Process().children())
    return lambda: [child for child in psutil.Process().children() if child not in before]


@pytest.fixture(scope="module")
def math_judge():
    with Judge("math", num_workers=1, timeout_s=20.0) as judge:
        yield judge


@pytest.mark.parametrize(
    "answer, verdict, reward",
    [
        ("7+5=12,4+8+1=13;132", Verdict.CORRECT, 1.0),
        (";132", Verdict.CORRECT, 1.0),
        ("7+5=12;4+8+1=13;132", Verdict.WRONG, 0.0),
        ("132;132;", Verdict.WRONG, 0.0),
        ("1;0132", Verdict.WRONG, 0.0),
        ("1; 132", Verdict.WRONG, 0.0),
        (";", Verdict.WRONG, 0.0),
        ("132", Verdict.NO_ANSWER, 0.0),
        ("", Verdict.NO_ANSWER, 0.0),
    ],
)
def test_arithmetic_wants_one_semicolon_and_exactly_the_result(answer, verdict, reward):
    with Judge("arithmetic", require_stop=True) as judge:
        assert judge.judge(questions(["47+85="] * 2, ["132"] * 2, [answer] * 2, [Stop.EOS, Stop.LENGTH])) == [
            Judgement(verdict, reward),
            Judgement(Verdict.NO_ANSWER, 0.0),
        ]


@pytest.mark.nightly
def test_every_gold_working_is_correct_and_every_other_result_wrong():
    with Judge("arithmetic", require_stop=True) as judge:
        for skill in SKILLS:
            examples = training_examples(skill)
            golds = [e.result for e in examples]
            stops = [Stop.EOS] * len(examples)
            texts = [e.answer for e in examples]
            prompts = [e.prompt for e in examples]
            assert {j.reward for j in judge.judge(questions(prompts, golds, texts, stops))} == {1.0}
            assert {j.reward for j in judge.judge(questions(prompts, golds, [t + "0" for t in texts], stops))} == {0.0}


def test_comparing_text_starts_no_process(new_workers):
    with Judge("arithmetic") as judge:
        verdicts(judge, ["7+5=12,4+8+1=13;132"] * 1000, gold="132")
        assert (judge.counts.num_answers, judge.counts.num_distinct) == (1000, 1)
        assert not new_workers()


@pytest.mark.parametrize(
    "gold, answer, verdict",
    [
        ("18", "so \\boxed{18}", "CORRECT"),
        ("Natalia sold 9.\n#### 7,000", "\\boxed{7000}", "CORRECT"),
        ("thus $\\boxed{\\frac{1}{2}}$.", "\\boxed{0.5}", "CORRECT"),
        ("27.0", "\\boxed{27}", "CORRECT"),
        ("025", "\\boxed{25}", "CORRECT"),
        ("18", "\\boxed{17} no, \\boxed{18}", "CORRECT"),
        ("18", "\\boxed{18} no, \\boxed{17}", "WRONG"),
        ("\\left\\{1,2\\right\\}", "\\boxed{\\{2, 1\\}}", "CORRECT"),
        ("\\frac{\\sqrt{3}}{2}", "\\boxed{\\sqrt{\\frac{3}{4}}}", "CORRECT"),
        ("x^2+2x+1", "\\boxed{(x+1)^2}", "CORRECT"),
        ("(1,2)", "\\boxed{(2,1)}", "WRONG"),
        ("1234", "\\boxed{1, 234}", "WRONG"),
        ("1/3", "\\boxed{0.33}", "WRONG"),
        ("8", "\\boxed{7 or 8}", "WRONG"),
        ("7", "\\boxed{x \\le 7}", "WRONG"),
        ("7", "\\boxed{x \\ne 7}", "WRONG"),
        ("7", "\\boxed{x > 7}", "WRONG"),
        ("7", "\\boxed{x = 7}", "CORRECT"),
        ("x \\le 7", "\\boxed{7 \\ge x}", "CORRECT"),
        ("(-\\infty, 7]", "\\boxed{x \\le 7}", "CORRECT"),
        ("73", "\\boxed{\\textbf{(073)}}", "CORRECT"),
        ("10^{10}", "\\boxed{10^{11}}", "WRONG"),
        ("18", "18", "NO_ANSWER"),
        ("18", "", "NO_ANSWER"),
        ("18", "\\boxed{18", "NO_ANSWER"),
        ("18", "\\boxed{}", "WRONG"),
        ("5", "\\boxed 5", "CORRECT"),
        ("5", "\\fbox{5}", "CORRECT"),
        ("5", "\\boxedx{5}", "NO_ANSWER"),
        ("5", "<think>\\boxed{4}</think> \\boxed{5}", "CORRECT"),
        ("5", "<think>\\boxed{5}</think> it is five", "NO_ANSWER"),
        ("5", "<think>perhaps \\boxed{5}", "NO_ANSWER"),
    ],
)
def test_mathematics(math_judge, gold, answer, verdict):
    assert verdicts(math_judge, [answer], gold) == [verdict]


def test_nested_braces_by_hand():
    assert math_grader.last_boxed("a \\boxed{x^{2^{3}}+\\{1\\}} b") == "x^{2^{3}}+\\{1\\}"
    assert math_grader.last_boxed("\\boxed{1} \\boxed{2") == "1"
    assert math_grader.last_boxed("} \\boxed{\\frac{1}{2}} {") == "\\frac{1}{2}"
    assert math_grader.last_boxed("\\boxed{" * 50_000) is None


def test_workers_import_no_model_library():
    with Judge(CASES, num_workers=1) as judge:
        assert verdicts(judge, ["modules"]) == ["WRONG"]  # 0.0: none of them is loaded


def test_a_policy_cannot_learn_to_be_unjudged(math_judge):
    """A tower of powers takes more time than there is, and yet the gold can be judged: the answer is wrong."""
    with Judge("math", timeout_s=2.0) as judge:
        texts = ["\\boxed{12^{23^{31^{22}}}}", "\\boxed{18}"]
        found = judge.judge(questions(["", ""], ["18", "18"], texts, [Stop.EOS] * 2))
    assert [judgement.reward for judgement in found] == [0.0, 1.0]
    assert all(judgement.is_judged for judgement in found)


@pytest.mark.nightly
def test_a_failure_is_the_judges_when_the_gold_fails_too():
    with Judge(CASES, timeout_s=1.0) as judge:
        golds = ["1", "hang", "raise", "die", "0.5"]
        found = judge.judge(questions([""] * 5, golds, ["hang", "hang", "raise", "die", "die"], [Stop.EOS] * 5))
        assert [j.verdict.name for j in found] == ["TIMEOUT", "TIMEOUT", "ERROR", "ERROR", "ERROR"]
        # nothing had worked before this call: the first answers that could prove the grader are the golds' own
        assert [j.is_judged for j in found] == [False] * 5
        assert verdicts(judge, ["1"]) == ["CORRECT"]
        found = judge.judge(questions([""] * 5, golds, ["hang", "hang", "raise", "die", "die"], [Stop.EOS] * 5))
        assert [j.is_judged for j in found] == [True, False, False, False, True]
        assert judge.take_report().num_unjudged == 8
        assert judge.take_report().num_unjudged == 0


def test_what_is_no_reward_is_an_error_that_names_it():
    names = ["half", "text", "two", "minus", "nan", "list", "object", "complex", "arrays", "nothing", "true", "numpy"]
    with Judge(f"{FILE}:misused") as judge:
        found = judge.judge(questions([""] * len(names), ["half"] * len(names), names, [Stop.EOS] * len(names)))
        assert [j.verdict.name for j in found] == ["WRONG", *["ERROR"] * 8, "NO_ANSWER", "CORRECT", "WRONG"]
        assert [j.reward for j in found if j.is_judged] == [0.5, 0.0, 1.0, 0.5]
        said = list(judge.take_report().errors)
        assert [text.split("returned ")[1].split(" ")[0] for text in said] == [
            "str", "float", "int", "float", "list", "object", "complex", "ndarray"
        ]  # fmt: skip
        assert judge.counts.num_workers_replaced == 0


def test_equal_answers_are_graded_once():
    with Judge(CASES, num_workers=1) as judge:
        texts = ["count calls", "1", "count calls", "count calls"]
        found = judge.judge(questions(["p"] * 3 + ["q"], [""] * 4, texts, [Stop.EOS] * 4))
        assert [j.reward for j in found] == [1.0, 1.0, 1.0, 0.5]
        assert (judge.counts.num_answers, judge.counts.num_distinct) == (4, 3)


def test_it_works_in_a_thread():
    """math-verify's own time limit raises in every thread but the main one, and then counts as a wrong answer."""
    found = []
    with Judge("math", num_workers=1, timeout_s=20.0) as judge:
        thread = threading.Thread(target=lambda: found.extend(verdicts(judge, ["\\boxed{\\frac12}"], "0.5")))
        thread.start()
        thread.join()
    assert found == ["CORRECT"]


@pytest.mark.parametrize(
    "kind, message",
    [
        ("maths", "'maths' is unknown; known: math, math_any, number, choice, json, program, exact, arithmetic, model"),
        (f"{FILE}:two_arguments", r"takes \(text, gold\), and is called with \(prompt, answer, gold\)"),
        (f"{FILE}:KEPT", "it is a list, and a grader is a function"),
        ("no_such_module:reward", "cannot be loaded: ModuleNotFoundError"),
        ("hacpo_grading.graders.graders:no_such", "cannot be loaded: AttributeError"),
        ("absent.py:reward", "cannot be loaded: FileNotFoundError"),
        (":reward", "is no grader; write module:function"),
    ],
)
def test_a_kind_that_does_not_exist_is_said_at_once(kind, message, new_workers):
    with pytest.raises(ValueError, match=message):
        Judge(kind)
    assert not new_workers()


@pytest.mark.parametrize(
    "kind, options, message",
    [
        ("number", {"rel_toll": 0.1}, "'number': it has no option rel_toll; its options are: rel_tol, abs_tol"),
        ("number", {"rel_tol": "1"}, r"option rel_tol \('1'\) must be a number from 0, below 1"),
        ("number", {"abs_tol": -1}, r"option abs_tol \(-1\) must be a number from 0, below inf"),
        ("exact", {"prompt": "x"}, "no option prompt; its options are: none"),
        ("math", {"rel_tol": 0.1}, "no option rel_tol; its options are: relative"),
        (f"{FILE}:with_options", {"bonus": 1.0, "malus": 1.0}, "no option malus; its options are: bonus, name"),
    ],
)
def test_an_option_that_does_not_exist_is_said_at_once(kind, options, message, new_workers):
    with pytest.raises(ValueError, match=message):
        Judge(kind, options=options)
    assert not new_workers()


def test_options_reach_the_grader():
    with Judge(f"{FILE}:with_options", options={"bonus": 0.75}) as judge:
        assert judge.judge(questions([""], [""], [""], [Stop.EOS]))[0].reward == 0.75
    with Judge("number", options={"rel_tol": 0.1}) as judge:
        assert verdicts(judge, ["\\boxed{1.09}", "1.11"]) == ["CORRECT", "WRONG"]


@pytest.mark.parametrize(
    ("reward", "success", "verdict"),
    [
        (0.7 + 0.2 + 0.1, 1.0, Verdict.CORRECT),  # .9999999999999999: full parts, added up
        (1.0 - 1e-8, 1.0, Verdict.WRONG),
        (0.1 + 0.2, 0.3, Verdict.CORRECT),
        (0.3, 0.1 + 0.2, Verdict.CORRECT),  # the same number, added up on the other side
        (0.0, 1e-12, Verdict.WRONG),  # nothing earned is never a success
        (None, 1e-12, Verdict.NO_ANSWER),
    ],
)
def test_a_reward_is_a_success_up_to_the_rounding_of_a_sum(reward, success, verdict):
    assert judgement_of(Outcome(reward), True, success).verdict is verdict


def test_closing_twice_and_nothing_to_judge():
    judge = Judge(CASES, num_workers=1)
    assert judge.judge(questions([], [], [], [])) == []
    judge.close()
    judge.close()
    with pytest.raises(AssertionError):
        verdicts(judge, ["1"])


@pytest.mark.parametrize("module", ["math_grader", "graders"])
def test_built_in_graders_import_no_model_library(module):
    heavy = {"torch", "transformers", "vllm", "numpy"}
    code = f"import hacpo_grading.graders.{module}, sys; print({heavy} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "set()\n"
