"""A rank that is forked begins as a fresh interpreter does; the parts of a start add up to what was spent."""

import importlib.util
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from job import run_here
from repository import ROOT

from hacpo_mega.cli.start import UNUSED, hidden_modules
from hacpo_mega.cluster.groups.spans import Spans
from hacpo_mega.cluster.machine.environment import LAUNCHER_PID, used_since_begin
from hacpo_mega.jobs.forked_rank import ForkedRank
from hacpo_mega.jobs.local import CHECKPOINT_SIGNALS, END_SIGNALS, run_on_this_machine
from hacpo_mega.logbook.files.metrics import Metrics
from hacpo_mega.logbook.steps.start_parts import StartParts

SIGNALS = (*CHECKPOINT_SIGNALS, *END_SIGNALS)
# The state of a process when it begins. A fresh interpreter raises KeyboardInterrupt, until a rank says otherwise.
LOOK = f"""
import atexit, json, os, signal, sys, threading
heeded = [int(n) for n in {tuple(map(int, SIGNALS))} if signal.getsignal(n) not in (signal.SIG_DFL, signal.default_int_handler)]
found = dict(
    leads=(os.getsid(0), os.getpgid(0)) == (os.getpid(),) * 2, parent=os.getppid(), heeded=heeded,
    blocked=len(signal.pthread_sigmask(signal.SIG_BLOCK, [])), argv=sys.argv[1:], rank=os.environ["RANK"],
    name=__name__, spec=__spec__.name, main=sys.modules["__main__"].__name__, cwd=os.getcwd(),
    threads=threading.active_count(),
)
print(json.dumps(found))
sys.exit(int(sys.argv[2]))
"""  # noqa: E501


@pytest.fixture
def look(tmp_path, monkeypatch):
    """The name of a module that says what it finds, for this process and those it starts."""
    (tmp_path / "look_around.py").write_text(LOOK)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    return "look_around"


def test_a_forked_rank_begins_as_a_fresh_interpreter_does(look, capfd):
    arguments, environment = ["train", "3"], {"RANK": "7"}
    command = [sys.executable, "-m", look, *arguments]
    fresh = subprocess.Popen(command, env=os.environ | environment, start_new_session=True)
    assert fresh.wait() == 3
    told = json.loads(capfd.readouterr().out)
    before = {number: signal.signal(number, lambda *_: None) for number in SIGNALS}
    try:
        rank = ForkedRank(look, arguments, environment, SIGNALS)
        assert signal.pthread_sigmask(signal.SIG_BLOCK, []).isdisjoint(SIGNALS)
        rank.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert (rank.poll(), rank.returncode) == (3, 3)
    assert json.loads(capfd.readouterr().out) == told
    assert (told["leads"], told["heeded"], told["argv"], told["rank"]) == (True, [], arguments, "7")


def test_a_forked_rank_that_a_signal_ends_has_its_number(tmp_path, monkeypatch):
    (tmp_path / "sleep_long.py").write_text("import time\nprint('there', flush=True)\ntime.sleep(600)\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    rank = ForkedRank("sleep_long", [], {}, SIGNALS)
    assert rank.poll() is None
    rank.send_signal(signal.SIGTERM)
    rank.wait()
    rank.send_signal(signal.SIGTERM)  # it is gone: nobody else may be told
    assert rank.returncode == -signal.SIGTERM


def test_a_signal_finds_nobody_where_a_rank_has_just_ended(tmp_path, monkeypatch):
    """As in a handler that strikes when the kernel has told of the end and Python has not noted it yet."""
    (tmp_path / "ends.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    rank = ForkedRank("ends", [], {}, SIGNALS)
    os.waitpid(rank.pid, 0)
    rank.send_signal(signal.SIGTERM)


FORKED_AND_FRESH = pytest.mark.parametrize("imports", [lambda: None, None], ids=["forked", "fresh"])


@pytest.fixture
def rank_that(tmp_path, monkeypatch):
    """Says what a rank of the launcher runs instead of a command."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr("hacpo_mega.jobs.local.MODULE", "rank_that")
    return lambda text: (tmp_path / "rank_that.py").write_text(text)


@contextmanager
def ignored(number: signal.Signals) -> Iterator[None]:
    before = signal.signal(number, signal.SIG_IGN)
    try:
        yield
        assert signal.getsignal(number) == signal.SIG_IGN
    finally:
        signal.signal(number, before)


@FORKED_AND_FRESH
def test_a_launcher_hears_how_ranks_end_though_it_was_started_to_ignore_it(imports, rank_that):
    """As by a shell's `trap '' CHLD`: no end would ever be told, or every one would be a good one."""
    rank_that("raise SystemExit(3)")
    looks = iter(range(300))
    with ignored(signal.SIGCHLD):
        assert run_on_this_machine([], 1, look=lambda: next(looks), imports=imports) == 3


@FORKED_AND_FRESH
def test_a_job_under_nohup_outlives_its_terminal(imports, rank_that):
    rank_that("import os, signal\nos.kill(os.getppid(), signal.SIGHUP)\nos.kill(os.getpid(), signal.SIGHUP)")
    assert run_on_this_machine([], 1, imports=imports) == 128 + signal.SIGHUP
    with ignored(signal.SIGHUP):
        assert run_on_this_machine([], 1, imports=imports) == 0


LOADING = """
import sys
class Loading:
    def find_spec(self, name, *how):
        if name == "hacpo_mega.cli.app":
            raise KeyboardInterrupt
sys.meta_path.insert(0, Loading())
from hacpo_mega.cli import main
main()
"""


def test_a_command_is_interrupted_while_it_loads():
    for shell in ("", " >&-"):
        command = ["bash", "-c", f'exec "$0" -c "$1"{shell}', sys.executable, LOADING]
        done = subprocess.run(command, capture_output=True, text=True)
        assert (done.returncode, done.stderr) == (130, "")


QUICKSTART = """
import sys, typer
from hacpo_mega.cli.quickstart import quickstart
sys.executable = "./command"
typer.run(quickstart)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_quickstart_ends_as_the_command_that_it_runs(tmp_path, number):
    """It is told to end, and its command needs a while to."""
    command = tmp_path / "command"
    command.write_text("#!/bin/sh\ntrap 'sleep 2; exit 75' TERM INT\ntouch ready\nwhile :; do sleep 0.1; done\n")
    command.chmod(0o755)
    with subprocess.Popen([sys.executable, "-c", QUICKSTART], cwd=tmp_path) as process:
        while not (tmp_path / "ready").exists():
            assert process.poll() is None
            time.sleep(0.1)
        process.send_signal(number)
        assert process.wait(60) == 75


def test_the_parts_of_a_start_are_the_slowest_ranks():
    clock = iter([0.0, 2.0, 3.0, 7.0, 10.0, 10.5]).__next__
    spans = Spans("a", clock=clock)
    # Two ranks, of which the other one's engines took a second longer.
    metrics = Metrics("a", lambda mine: [mine, mine.replace(b'engine_s": [4', b'engine_s": [5')])
    parts = StartParts()
    parts.joined(spans)
    for name in ("data", "engine", "engine"):
        with spans.span(name):
            pass
    said = parts.finish(spans, metrics)
    timing = metrics.reduce().timing
    assert (timing["start/data_s"], timing["start/engine_s"]) == (2.0, 5.5)
    assert "start/weights_s" not in timing and 0.0 <= timing["start/groups_s"] < timing["start/imports_s"]
    assert said.startswith("start: imports ") and "data 2.0, engine 4.5 of " in said
    assert not spans.is_on


def test_what_a_process_has_used_is_what_the_kernel_says(monkeypatch):
    monkeypatch.delenv(LAUNCHER_PID, raising=False)
    began = time.time() - float(subprocess.check_output(["ps", "-o", "etimes=", "-p", str(os.getpid())]))
    first = used_since_begin()
    assert abs(time.time() - first.clock_s - began) < 2.5
    assert abs(first.processor_s - sum(os.times()[:2])) < 0.5
    worker = threading.Thread(target=lambda: sum(range(10**6)))
    worker.start()
    worker.join()
    second = used_since_begin()
    assert second.clock_s >= first.clock_s and second.processor_s >= first.processor_s
    # The processor time of a process and its launcher is added up.
    monkeypatch.setenv(LAUNCHER_PID, str(os.getppid()))
    assert used_since_begin().processor_s >= time.process_time() - 0.5


def test_an_absent_library_is_there_again_afterwards():
    sys.modules.pop("colorsys", None)
    with hidden_modules(["colorsys", "json"]):
        with pytest.raises(ModuleNotFoundError):
            import colorsys
        assert json.loads("1") == 1  # what has been imported stays
    import colorsys

    assert colorsys.rgb_to_hsv(0.0, 0.0, 1.0)[2] == 1.0


def test_what_needs_scipy_is_absent_with_it(tmp_path, monkeypatch):
    """transformers imports scikit-learn where it finds it, which ended a start where that was installed."""
    (tmp_path / "sklearn").mkdir()
    (tmp_path / "sklearn" / "__init__.py").write_text("import scipy.sparse\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert importlib.util.find_spec("sklearn").origin.startswith(str(tmp_path))
    with hidden_modules(UNUSED):
        assert importlib.util.find_spec("sklearn") is None


LAUNCHERS = {
    "ranks": ("-P", "-c", "from hacpo_mega.jobs.local import run_on_this_machine as run; run(['--version'], 1)"),
    "quickstart": ("-P", "-c", "from hacpo_mega.cli.quickstart import quickstart; quickstart(['no=key'])"),
}


@pytest.mark.nightly
@pytest.mark.parametrize("launcher", [*LAUNCHERS, "local.sh"])
def test_a_rank_runs_no_file_that_lies_in_the_current_folder(tmp_path, launcher):
    """As in the folder of somebody's run, which `eval` and `export` are to execute nothing of."""
    (tmp_path / "typer.py").write_text("open('this_ran', 'w')\n")
    if launcher == "local.sh":
        command = [ROOT / "launch/local.sh", "nowhere.toml"]
    else:
        command = [sys.executable, *LAUNCHERS[launcher]]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONSAFEPATH"}
    subprocess.run(command, cwd=tmp_path, env=environment | {"PYTHON": sys.executable}, capture_output=True)
    assert not (tmp_path / "this_ran").exists()


def test_a_grader_in_the_current_folder_is_found_last(tmp_path, monkeypatch):
    """Training accepts what `check` accepts, and a module of that folder takes no other's place."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path not in ("", str(tmp_path))])
    for name in ("grader_of_here", "typer"):
        (tmp_path / f"{name}.py").write_text("def reward(prompt, answer, gold):\n    return 1.0\n")
    (tmp_path / "answers.jsonl").write_text('{"prompt": "1+1", "gold": "2", "pred": "2"}\n')
    done = run_here("grade", "answers.jsonl", "--out", "verdicts.jsonl", "--reward", "grader_of_here:reward")
    assert done.returncode == 0, done.stderr
    assert sys.path[-1] == str(tmp_path)
