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
from hacpo_mega.records import Judgement, Stop, Verdict

FILE = ROOT / "tests/support/grading_cases.py"
CASES = f"{FILE}:reward"


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
            Judgement(verdict, reward),
            Judgement(Verdict.NO_ANSWER, 0.0),
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
    with Judge(CASES, num_workers=2, timeout_s=1.0) as judge:
        judgements = judge.judge([""] * len(texts), ["1"] * len(texts), texts, [Stop.EOS] * len(texts))
        assert [j.verdict.name for j in judgements[:12]] == [
            "CORRECT", "TIMEOUT", "WRONG", "ERROR", "ERROR", "CORRECT",
            "CORRECT", "NO_ANSWER", "ERROR", "ERROR", "ERROR", "WRONG",
        ]  # fmt: skip
        assert {j.verdict for j in judgements[12:]} == {Verdict.CORRECT}
        rewards = [None if math.isnan(j.reward) else j.reward for j in judgements[:12]]
        # what the answer did to the grader earns 0; what the grader returned in error is unjudged
        assert rewards == [1.0, 0.0, 0.25, 0.0, 0.0, 1.0, 1.0, 0.0, 0.0, None, None, 0.0]
        report = judge.take_report()
        assert (report.num_answers, report.num_unjudged, report.num_timeouts) == (52, 2, 1)
        reasons = "\n".join(report.errors)
        for reason in (
            "worker died (exit status 3)",
            "what the grader was",
            "MemoryError",
            "returned float 7.0, expected a number in [0, 1]",
            "returned float nan, expected a number in [0, 1]",
        ):
            assert reason in reasons
        assert (judge.counts.num_timeouts, judge.counts.num_errors, judge.counts.num_answers) == (1, 5, 52)
        workers = new_workers()
    assert len(workers) == 2
    assert not any(worker.is_running() for worker in workers)


def test_a_policy_cannot_learn_to_be_unjudged(math_judge):
    """A tower of powers takes more time than there is, and yet the gold can be judged: the answer is wrong."""
    with Judge("math", timeout_s=2.0) as judge:
        texts = ["\\boxed{12^{23^{31^{22}}}}", "\\boxed{18}"]
        found = judge.judge(["", ""], ["18", "18"], texts, [Stop.EOS] * 2)
    assert [judgement.reward for judgement in found] == [0.0, 1.0]
    assert all(judgement.is_judged for judgement in found)


@pytest.mark.nightly
def test_a_failure_is_the_judges_when_the_gold_fails_too():
    with Judge(CASES, timeout_s=1.0) as judge:
        golds = ["1", "hang", "raise", "die", "0.5"]
        found = judge.judge([""] * 5, golds, ["hang", "hang", "raise", "die", "die"], [Stop.EOS] * 5)
        assert [j.verdict.name for j in found] == ["TIMEOUT", "TIMEOUT", "ERROR", "ERROR", "ERROR"]
        # nothing had worked before this call: the first answers that could prove the grader are the golds' own
        assert [j.is_judged for j in found] == [False] * 5
        assert verdicts(judge, ["1"]) == ["CORRECT"]
        found = judge.judge([""] * 5, golds, ["hang", "hang", "raise", "die", "die"], [Stop.EOS] * 5)
        assert [j.is_judged for j in found] == [True, False, False, False, True]
        assert judge.take_report().num_unjudged == 8
        assert judge.take_report().num_unjudged == 0


def test_an_outage_of_the_users_grader_is_no_wrong_answer():
    with Judge(f"{FILE}:outage") as judge:
        assert verdicts(judge, ["1", "0.5"]) == ["CORRECT", "WRONG"]
        found = judge.judge(["", ""], ["2", "2"], ["1", "1 "], [Stop.EOS] * 2)
        assert [(j.verdict.name, j.is_judged) for j in found] == [("ERROR", False)] * 2
        assert judge.take_report().first_error == "ConnectionError: no route to the reward service"


@pytest.mark.parametrize(
    "function, error",
    [
        ("raises", "RuntimeError: the reward service does not answer"),
        ("text", "the grader returned str '0.5', expected a number in [0, 1] or None"),
        ("ends", "the worker died (exit status 7)"),
    ],
)
def test_a_grader_that_always_fails_is_given_up_after_a_few_answers(function, error):
    with Judge(f"{FILE}:{function}", num_workers=2) as judge:
        assert set(verdicts(judge, [str(i) for i in range(500)])) == {"ERROR"}
        report = judge.take_report()
        assert (report.num_answers, report.num_unjudged) == (500, 500)
        assert report.errors == {error: 8, "not tried: the grader failed on all answers before": 492}
        assert report.first_error == error
        assert judge.counts.num_workers_replaced == (8 if function == "ends" else 0)


def test_what_is_no_reward_is_an_error_that_names_it():
    names = ["half", "text", "two", "minus", "nan", "list", "object", "complex", "arrays", "nothing", "true", "numpy"]
    with Judge(f"{FILE}:misused") as judge:
        found = judge.judge([""] * len(names), ["half"] * len(names), names, [Stop.EOS] * len(names))
        assert [j.verdict.name for j in found] == ["WRONG", *["ERROR"] * 8, "NO_ANSWER", "CORRECT", "WRONG"]
        assert [j.reward for j in found if j.is_judged] == [0.5, 0.0, 1.0, 0.5]
        said = list(judge.take_report().errors)
        assert [text.split("returned ")[1].split(" ")[0] for text in said] == [
            "str", "float", "int", "float", "list", "object", "complex", "ndarray"
        ]  # fmt: skip
        assert judge.counts.num_workers_replaced == 0


@pytest.mark.nightly
def test_memory_that_stays_behind_is_not_held_against_the_next_answer():
    """The second half of the limit is gone when "memory for good" comes again; a new worker has it all."""
    with Judge(CASES, memory_bytes=3 << 30) as judge:
        assert verdicts(judge, ["memory for good", "0", "memory for good ", "1"], gold="0")[3] == "CORRECT"
        texts = ["memory for good"] * 2
        found = judge.judge(["a", "b"], ["0", "0"], texts, [Stop.EOS] * 2)
        assert [j.verdict.name for j in found] == ["CORRECT", "CORRECT"]


def test_equal_answers_are_graded_once():
    with Judge(CASES, num_workers=1) as judge:
        texts = ["count calls", "1", "count calls", "count calls"]
        found = judge.judge(["p"] * 3 + ["q"], [""] * 4, texts, [Stop.EOS] * 4)
        assert [j.reward for j in found] == [1.0, 1.0, 1.0, 0.5]
        assert (judge.counts.num_answers, judge.counts.num_distinct) == (4, 3)


@pytest.mark.nightly
def test_a_busy_machine_changes_no_verdict():
    """Loops on every processor leave a worker a small share of the wall time; its CPU time is its own."""
    num_loops = 2 * len(os.sched_getaffinity(0))
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(num_loops)]
    try:
        with Judge(CASES, num_workers=2, timeout_s=1.0) as judge:
            texts = ["half a second", "hang", "half a second"]
            assert verdicts(judge, ["1"]) == ["CORRECT"]
            found = judge.judge(["a", "b", "c"], ["1"] * 3, texts, [Stop.EOS] * 3)
            assert [j.verdict.name for j in found] == ["CORRECT", "TIMEOUT", "CORRECT"]
            assert judge.counts.wall_s > 1.0
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def test_a_grader_that_sleeps_over_an_answer_is_named_and_loses_it_alone(capfd):
    with Judge(CASES, timeout_s=0.2) as judge:
        assert verdicts(judge, ["1", "sleep for ever", "0"], gold="1") == ["CORRECT", "TIMEOUT", "WRONG"]
        report = judge.take_report()
        assert (report.num_timeouts, report.num_unjudged) == (1, 0)
    assert capfd.readouterr().err.count("hangs: it slept 0.4 s (reward.timeout_s x 2) over 1 of the 3 answers") == 1


def test_a_grader_that_always_sleeps_is_given_up_after_three_answers(capfd):
    with Judge(f"{FILE}:hangs", timeout_s=0.2) as judge:
        found = judge.judge([""] * 50, ["1"] * 50, [str(i) for i in range(50)], [Stop.EOS] * 50)
        assert not any(judgement.is_judged for judgement in found)
        report = judge.take_report()
        slept, *not_tried = report.errors.items()
        assert slept == ("the grader slept instead of coming to a verdict, for 0.4 s (2 x reward.timeout_s)", 3)
        assert sum(number for _, number in not_tried) == 47
        assert judge.counts.num_workers_replaced == 3
        verdicts(judge, [str(i) for i in range(50)])
        assert judge.counts.num_workers_replaced == 4, "one answer shows that it still sleeps"
    assert capfd.readouterr().err.count("hangs: it slept") == 1


def test_a_grader_that_waits_for_its_child_to_work_does_not_sleep():
    with Judge(f"{FILE}:works_in_a_child", timeout_s=0.4) as judge:
        assert verdicts(judge, ["1"]) == ["CORRECT"]


INTRUSIONS = {
    "fork": "CORRECT", "fork and stay": "CORRECT", "fork, stay and die": "ERROR", "write": "ERROR",
    "write little": "ERROR", "close": "ERROR", "read": "CORRECT", "exit": "ERROR", "interrupt": "ERROR",
    "thread": "CORRECT", "huge": "ERROR",
}  # fmt: skip


def test_a_grader_that_reaches_for_its_worker_costs_its_answer_alone(new_workers):
    before = set(psutil.pids())
    with Judge(f"{FILE}:intrudes", num_workers=2, timeout_s=5.0) as judge:
        texts = [text for intrusion in INTRUSIONS for text in (intrusion, f"fine after {intrusion}")]
        found = dict(zip(texts, verdicts(judge, texts)))
    assert {text: found[text] for text in INTRUSIONS} == INTRUSIONS
    assert [text for text in texts if text not in INTRUSIONS and found[text] != "CORRECT"] == []
    left = [process for process in psutil.process_iter(["cmdline"]) if process.pid not in before]
    assert not [process for process in left if "grading_worker.py" in " ".join(process.info["cmdline"] or [])]


def test_workers_that_cannot_be_replaced_leave_answers_unjudged(tmp_path):
    grader = tmp_path / "grader.py"
    grader.write_text("import os\ndef reward(p, a, g):\n    return 1.0 if a == 'fine' else os._exit(1)\n")
    with Judge(f"{grader}:reward") as judge:
        assert verdicts(judge, ["fine"]) == ["CORRECT"]
        grader.write_text("import os\nos._exit(5)\n")
        found = judge.judge([""] * 2, ["fine"] * 2, ["fine", "die"], [Stop.EOS] * 2)
        assert [j.verdict.name for j in found] == ["CORRECT", "ERROR"]
        assert "no grading worker for" in judge.take_report().first_error
        assert not found[1].is_judged
        grader.write_text("def reward(p, a, g):\n    return 0.25\n")
        assert verdicts(judge, ["die"]) == ["WRONG"]  # it recovers with the grader


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


@pytest.mark.nightly
@pytest.mark.parametrize("doing", ["idle", "hang", "hang in C"])
def test_workers_do_not_outlive_a_killed_parent(doing):
    code = (
        "import sys, psutil; from hacpo_mega.grading.judge import Judge; from hacpo_mega.records import Stop\n"
        f"judge = Judge({CASES!r}, num_workers=1, timeout_s=5.0)\n"
        "print(psutil.Process().children()[0].pid, flush=True)\n"
        f"texts = [] if {doing!r} == 'idle' else [{doing!r}]\n"
        "judge.judge([''] * len(texts), [''] * len(texts), texts, [Stop.EOS] * len(texts)); sys.stdin.read()"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    worker = psutil.Process(int(parent.stdout.readline()))
    time.sleep(1.0)
    parent.kill()
    parent.wait()
    parent.stdin.close()
    parent.stdout.close()
    deadline = time.monotonic() + 120  # a hang in C ends with its CPU allowance
    while worker.is_running() and worker.status() != psutil.STATUS_ZOMBIE and time.monotonic() < deadline:
        time.sleep(0.2)
    assert not worker.is_running() or worker.status() == psutil.STATUS_ZOMBIE  # a zombie here belongs to init


@pytest.mark.parametrize(
    "kind, message",
    [
        ("maths", "'maths' is unknown; known: math, math_any, number, choice, json, program, exact, arithmetic, model"),
        (f"{FILE}:two_arguments", r"takes \(text, gold\), and is called with \(prompt, answer, gold\)"),
        (f"{FILE}:KEPT", "it is a list, and a grader is a function"),
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
        assert judge.judge([""], [""], [""], [Stop.EOS])[0].reward == 0.75
    with Judge("number", options={"rel_tol": 0.1}) as judge:
        assert verdicts(judge, ["\\boxed{1.09}", "1.11"]) == ["CORRECT", "WRONG"]


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
    heavy = {"torch", "transformers", "vllm", "numpy"}
    code = f"import hacpo_mega.grading.{module}, sys; print({heavy} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "set()\n"
