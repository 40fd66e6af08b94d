"""The workers of a judge: a hang, a crash or a full memory costs one answer and leaves no process behind."""

import math
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import threading
import time

import psutil
import pytest
from judged import CASES, FILE, questions, verdicts

from hacpo_grading.judge import Judge
from hacpo_grading.judgement import Stop, Verdict
from hacpo_grading.workers import guarded_workers
from hacpo_grading.workers.worker_process import SHOWN_BYTES

pytestmark = pytest.mark.nightly


@pytest.fixture
def new_workers():
    """The workers started since the test began: another judge of this process may have its own."""
    before = set(psutil.Process().children())
    return lambda: [child for child in psutil.Process().children() if child not in before]


def test_every_way_to_fail_costs_one_answer_and_keeps_the_order(new_workers):
    texts = ["1", "hang", "0.25", "die", "raise", "1", "print", "no answer", "eat memory", "7", "nan", "0"] + ["1"] * 40
    with Judge(CASES, num_workers=2, timeout_s=1.0) as judge:
        judgements = judge.judge(questions([""] * len(texts), ["1"] * len(texts), texts, [Stop.EOS] * len(texts)))
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


def test_an_outage_of_the_users_grader_is_no_wrong_answer():
    with Judge(f"{FILE}:outage") as judge:
        assert verdicts(judge, ["1", "0.5"]) == ["CORRECT", "WRONG"]
        found = judge.judge(questions(["", ""], ["2", "2"], ["1", "1 "], [Stop.EOS] * 2))
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


def test_memory_that_stays_behind_is_not_held_against_the_next_answer():
    """The second half of the limit is gone when "memory for good" comes again; a new worker has it all."""
    with Judge(CASES, memory_bytes=3 << 30) as judge:
        assert verdicts(judge, ["memory for good", "0", "memory for good ", "1"], gold="0")[3] == "CORRECT"
        texts = ["memory for good"] * 2
        found = judge.judge(questions(["a", "b"], ["0", "0"], texts, [Stop.EOS] * 2))
        assert [j.verdict.name for j in found] == ["CORRECT", "CORRECT"]


def test_what_an_import_maps_is_not_taken_from_the_answers(tmp_path):
    """CUDA's libraries alone map more than a worker may take for an answer."""
    file = tmp_path / "maps.py"
    file.write_text("import mmap\nroom = mmap.mmap(-1, 3 << 30)\ndef own(answer):\n    return len(bytes(1 << 29)) > 0")
    with Judge(f"{file}:own") as judge:
        assert verdicts(judge, ["1"]) == ["CORRECT"]


def test_a_grader_may_start_processes_anew(tmp_path):
    (tmp_path / "spawned.py").write_text(
        "import multiprocessing\nfrom concurrent.futures import ProcessPoolExecutor\n"
        "def own(answer):\n"
        "    with ProcessPoolExecutor(1, multiprocessing.get_context('spawn')) as pool:\n"
        "        return pool.submit(float, answer).result()\n"
    )
    with Judge(f"{tmp_path}/spawned.py:own") as judge:
        assert verdicts(judge, ["1", "0"]) == ["CORRECT", "WRONG"]


def test_a_busy_machine_changes_no_verdict():
    """Loops on every processor leave a worker a small share of the wall time; its CPU time is its own."""
    num_loops = 2 * len(os.sched_getaffinity(0))
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(num_loops)]
    try:
        with Judge(CASES, num_workers=2, timeout_s=1.0) as judge:
            texts = ["half a second", "hang", "half a second"]
            assert verdicts(judge, ["1"]) == ["CORRECT"]
            found = judge.judge(questions(["a", "b", "c"], ["1"] * 3, texts, [Stop.EOS] * 3))
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
        found = judge.judge(questions([""] * 50, ["1"] * 50, [str(i) for i in range(50)], [Stop.EOS] * 50))
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
        found = judge.judge(questions([""] * 2, ["fine"] * 2, ["fine", "die"], [Stop.EOS] * 2))
        assert [j.verdict.name for j in found] == ["CORRECT", "ERROR"]
        assert "ends its process (exit status 5) while it is loaded" in judge.take_report().first_error
        assert not found[1].is_judged
        grader.write_text("def reward(p, a, g):\n    return 0.25\n")
        assert verdicts(judge, ["die"]) == ["WRONG"]  # it recovers with the grader


# How the import of a grader's file can come to no end, and what is said of it.
IMPORTS = {
    "import time; time.sleep(10**6)": "is not loaded after 1 s (reward.start_timeout_s): the import of {}, or",
    "while True: pass": "is not loaded after 1 s (reward.start_timeout_s): the import of {}, or",
    "import sys; sys.exit(0)": "ends its process (SystemExit: 0) while it is loaded: the import of {}, or",
    "raise KeyboardInterrupt": "cannot be loaded: KeyboardInterrupt",
    "import os; os._exit(0)": "ends its process (exit status 0) while it is loaded: the import of {}, or",
    "import os; os.abort()": "ends its process (SIGABRT) while it is loaded: the import of {}, or",
    "import os; os.kill(os.getpid(), 9)": "ends its process (SIGKILL) while it is loaded: the import of {}, or",
    "import os, time\nif os.fork(): os._exit(0)\ntime.sleep(600)": "ends its process (exit status 0) while it is",
    "while True: print('x' * 5000)": "prints without end while it is loaded: the import of {}, or",
    "import os\nfor fd in range(3, 9):\n    try: os.write(fd, b'x' * 99)\n    except OSError: pass":
        "cannot be loaded: the import of {}, or the constructor of a class, wrote into the pipe of its worker's",
}  # fmt: skip


@pytest.mark.parametrize("code", IMPORTS)
def test_a_file_whose_import_comes_to_no_end_is_named_in_a_line(code, tmp_path, new_workers, capfd):
    file = tmp_path / "grader.py"
    file.write_text(f"{code}\ndef reward(prompt, answer, gold):\n    return 1.0\n")
    with pytest.raises(ValueError, match=re.escape(IMPORTS[code].format(file))) as refused:
        Judge(f"{file}:reward", num_workers=2, start_timeout_s=1.0 if "1 s" in IMPORTS[code] else 600.0)
    assert "\n" not in str(refused.value)
    assert not new_workers()
    assert len(capfd.readouterr().err) <= 2 * SHOWN_BYTES


def test_a_start_that_takes_its_time_is_spoken_of_and_passes(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(guarded_workers, "NOTICE_S", 0.1)
    file = tmp_path / "grader.py"
    code = "import os, time\ntime.sleep(1.0)\nprint('loaded')\nos.fork()\n"  # the child is no second worker
    file.write_text(f"{code}class Reward:\n    def __call__(self, prompt, answer, gold):\n        return 1.0\n")
    with Judge(f"{file}:Reward", num_workers=2) as judge:
        assert verdicts(judge, ["1"]) == ["CORRECT"]
    said = capfd.readouterr().err
    assert said.count("is not loaded after 0.1 s: the import of") == 1 and "given up after 120 s" in said
    assert said.count("loaded\n") >= 2 and "cannot reply" not in said


def test_a_replaced_worker_that_hangs_is_not_waited_for_again(tmp_path):
    file = tmp_path / "grader.py"
    file.write_text("import os\ndef reward(p, a, g):\n    return 1.0 if a == 'fine' else os._exit(1)\n")
    with Judge(f"{file}:reward", start_timeout_s=10.0) as judge:
        assert verdicts(judge, ["fine"]) == ["CORRECT"]
        file.write_text("import time\ntime.sleep(600)\n")
        found = judge.judge(questions([""] * 2, ["fine"] * 2, ["die", "fine"], [Stop.EOS] * 2))
        assert not found[0].is_judged
        assert "is not loaded after 10 s" in judge.take_report().first_error
        assert judge.counts.num_workers_replaced == 1


def test_a_judging_that_was_interrupted_leaves_nothing_to_the_next(new_workers):
    """As by Ctrl-C in a notebook, or a time limit of the caller's own: late replies are none to other answers."""

    def interrupt(*_):
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        with Judge(CASES, num_workers=1, timeout_s=2.0) as judge:
            assert verdicts(judge, ["1"]) == ["CORRECT"]
            signal.setitimer(signal.ITIMER_REAL, 0.5)
            with pytest.raises(KeyboardInterrupt):
                verdicts(judge, ["hang", "0.25", "0.5"])
            assert verdicts(judge, ["1", "1 ", " 1"]) == ["CORRECT"] * 3
            with pytest.raises(TypeError):  # what no worker can be told
                judge.judge(questions([""], [b"1"], ["1"], [Stop.EOS]))
            assert verdicts(judge, ["1", "0"]) == ["CORRECT", "WRONG"]
            assert len(new_workers()) == 1
    finally:
        signal.signal(signal.SIGALRM, before)


def test_a_forked_process_has_workers_of_its_own():
    """As reward managers judge in a pool of processes; a thread of the parent's may be judging at the fork."""
    context = multiprocessing.get_context("fork")
    said = context.SimpleQueue()
    with Judge(CASES, timeout_s=20.0) as judge:

        def judges() -> None:
            said.put([verdicts(judge, [text])[0] for text in ("1", "0", "1 ")])

        assert verdicts(judge, ["1"]) == ["CORRECT"]
        thread = threading.Thread(target=verdicts, args=(judge, ["half a second"]))
        thread.start()
        children = [context.Process(target=judges, daemon=True) for _ in range(2)]
        for child in children:
            child.start()
        for child in children:
            child.join(120.0)
        thread.join()
        assert [child.exitcode for child in children] == [0, 0]
        assert [said.get(), said.get()] == [["CORRECT", "WRONG", "CORRECT"]] * 2
        assert verdicts(judge, ["1"]) == ["CORRECT"] and judge.counts.num_workers_replaced == 0


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


def test_answers_are_judged_at_the_same_time():
    with Judge(CASES, num_workers=2) as judge:
        assert set(verdicts(judge, ["sleep"] * 40)) == {"CORRECT"}
        assert judge.counts.wall_s < 40 * 0.05  # one after another cannot be faster than this


@pytest.mark.parametrize("doing", ["idle", "hang", "hang in C"])
def test_workers_do_not_outlive_a_killed_parent(doing):
    code = (
        "import sys, psutil; from hacpo_grading.judge import Judge; from hacpo_grading.judgement import Stop\n"
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


def test_a_worker_survives_an_interrupt_of_the_group(new_workers):
    with Judge(CASES, num_workers=1) as judge:
        (worker,) = new_workers()
        os.kill(worker.pid, signal.SIGINT)
        assert verdicts(judge, ["1"]) == ["CORRECT"]
        assert judge.counts.num_workers_replaced == 0
