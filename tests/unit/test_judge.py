"""The judge: right verdicts; a hang, a crash or a full memory costs one answer and leaves no process behind."""

import math
import os
import signal
import subprocess
import sys
import threading
import time

import psutil
import pytest
from repository import ROOT

from hacpo_mega.data.tasks import SKILLS, training_examples
from hacpo_mega.grading import math_grader
from hacpo_mega.grading.judge import Judge
from hacpo_mega.records import Stop, Verdict

CASES = f"{ROOT / 'tests/support/grading_cases.py'}:reward"


def verdicts(judge, texts, gold="1"):
    stops = [Stop.EOS] * len(texts)
    return [j.verdict.name for j in judge.judge([""] * len(texts), [gold] * len(texts), texts, stops)]


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
        assert judge.judge(["47+85="] * 2, ["132"] * 2, [answer] * 2, [Stop.EOS, Stop.LENGTH]) == [
            (verdict, reward),
            (Verdict.NO_ANSWER, 0.0),
        ]


def test_every_gold_working_is_correct_and_every_other_result_wrong():
    with Judge("arithmetic", require_stop=True) as judge:
        for skill in SKILLS:
            examples = training_examples(skill)
            golds = [e.result for e in examples]
            stops = [Stop.EOS] * len(examples)
            texts = [e.answer for e in examples]
            prompts = [e.prompt for e in examples]
            assert {j.reward for j in judge.judge(prompts, golds, texts, stops)} == {1.0}
            assert {j.reward for j in judge.judge(prompts, golds, [t + "0" for t in texts], stops)} == {0.0}


def test_a_thousand_arithmetic_answers_take_no_time():
    with Judge("arithmetic") as judge:
        verdicts(judge, ["7+5=12,4+8+1=13;132"] * 1000, gold="132")
        assert judge.counts.num_answers == 1000
        assert judge.counts.wall_s < 0.1


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
        ("(-\\infty, 7]", "\\boxed{x \\le 7}", "WRONG"),
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


def test_every_way_to_fail_costs_one_answer_and_keeps_the_order(new_workers):
    texts = ["1", "hang", "0.25", "die", "raise", "1", "print", "no answer", "eat memory", "7", "nan", "0"] + ["1"] * 40
    with Judge(CASES, num_workers=2, timeout_s=1.5) as judge:
        judgements = judge.judge([""] * len(texts), [""] * len(texts), texts, [Stop.EOS] * len(texts))
        assert [j.verdict.name for j in judgements[:12]] == [
            "CORRECT", "TIMEOUT", "WRONG", "ERROR", "ERROR", "CORRECT",
            "CORRECT", "NO_ANSWER", "ERROR", "ERROR", "ERROR", "WRONG",
        ]  # fmt: skip
        assert {j.verdict for j in judgements[12:]} == {Verdict.CORRECT}
        assert all(math.isnan(j.reward) == (not j.verdict.is_judged) for j in judgements)
        assert judgements[2].reward == 0.25
        reasons = "\n".join(judge.last_errors)
        for reason in (
            "worker died (exit status 3)",
            "what the grader was",
            "MemoryError",
            "returned 7.0",
            "returned nan",
        ):
            assert reason in reasons
        assert (judge.counts.num_timeouts, judge.counts.num_errors, judge.counts.num_answers) == (1, 5, 52)
        assert judge.counts.num_workers_replaced == 3  # hang, die and the full memory
        workers = new_workers()
    assert len(workers) == 2
    assert not any(worker.is_running() for worker in workers)


def test_native_code_that_never_comes_back_is_killed():
    """Neither a signal handler nor a thread of Python gets a turn inside one giant multiplication."""
    with Judge(CASES, num_workers=1, timeout_s=1.0) as judge:
        start = time.monotonic()
        assert verdicts(judge, ["hang in C", "1"]) == ["TIMEOUT", "CORRECT"]
        assert time.monotonic() - start < 30


def test_an_idle_worker_that_died_costs_nothing(new_workers):
    with Judge(CASES, num_workers=1) as judge:
        (worker,) = new_workers()
        worker.send_signal(signal.SIGKILL)
        worker.wait()
        assert verdicts(judge, ["1", "0"]) == ["CORRECT", "WRONG"]
        assert (judge.counts.num_errors, judge.counts.num_workers_replaced) == (0, 1)


def test_it_works_in_a_thread():
    """math-verify's own time limit raises in every thread but the main one, and then counts as a wrong answer."""
    found = []
    with Judge("math", num_workers=1, timeout_s=20.0) as judge:
        thread = threading.Thread(target=lambda: found.extend(verdicts(judge, ["\\boxed{\\frac12}"], "0.5")))
        thread.start()
        thread.join()
    assert found == ["CORRECT"]


def test_answers_are_judged_at_the_same_time():
    with Judge(CASES, num_workers=2) as judge:
        assert set(verdicts(judge, ["sleep"] * 40)) == {"CORRECT"}
        assert judge.counts.wall_s < 40 * 0.05  # one after another cannot be faster than this


@pytest.mark.parametrize("doing", ["idle", "hang", "hang in C"])
def test_workers_do_not_outlive_a_killed_parent(doing):
    code = (
        "import sys, psutil; from hacpo_mega.grading.judge import Judge; from hacpo_mega.records import Stop\n"
        f"judge = Judge({CASES!r}, num_workers=1, timeout_s=1.0)\n"
        "print(psutil.Process().children()[0].pid, flush=True)\n"
        f"texts = [] if {doing!r} == 'idle' else [{doing!r}]\n"
        "judge._workers.timeout_s = 1000.0\n"
        "judge.judge([''] * len(texts), [''] * len(texts), texts, [Stop.EOS] * len(texts)); sys.stdin.read()"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    worker = psutil.Process(int(parent.stdout.readline()))
    time.sleep(1.0)
    parent.kill()
    parent.wait()
    parent.stdin.close()
    parent.stdout.close()
    deadline = time.monotonic() + 120  # a hang in C ends with its CPU allowance, 2 * 1 + 2 seconds
    while worker.is_running() and worker.status() != psutil.STATUS_ZOMBIE and time.monotonic() < deadline:
        time.sleep(0.2)
    assert not worker.is_running() or worker.status() == psutil.STATUS_ZOMBIE  # a zombie here belongs to init


@pytest.mark.parametrize(
    "kind, message",
    [
        ("maths", "'maths' is unknown; known: arithmetic, exact, numeric, math, math_any"),
        ("no_such_module:reward", "cannot be loaded: ModuleNotFoundError"),
        ("hacpo_mega.grading.graders:no_such", "cannot be loaded: AttributeError"),
        ("absent.py:reward", "cannot be loaded: FileNotFoundError"),
        (":reward", "is no grader; write module:function"),
    ],
)
def test_a_kind_that_does_not_exist_is_said_at_once(kind, message, new_workers):
    with pytest.raises(ValueError, match=message):
        Judge(kind)
    assert not new_workers()


def test_closing_twice_and_nothing_to_judge():
    judge = Judge(CASES, num_workers=1)
    assert judge.judge([], [], [], []) == []
    judge.close()
    judge.close()
    with pytest.raises(AssertionError):
        verdicts(judge, ["1"])


def test_a_worker_survives_an_interrupt_of_the_group(new_workers):
    with Judge(CASES, num_workers=1) as judge:
        (worker,) = new_workers()
        os.kill(worker.pid, signal.SIGINT)
        assert verdicts(judge, ["1"]) == ["CORRECT"]
        assert judge.counts.num_workers_replaced == 0


@pytest.mark.parametrize("module", ["math_grader", "graders"])
def test_built_in_graders_import_no_model_library(module):
    code = (
        f"import hacpo_mega.data.{module}, sys; print({{'torch', 'transformers', 'vllm', 'numpy'}} & set(sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "set()\n"
