"""`hacpo_mega.train`: a job from a Python process, what its callbacks are shown, and what ends it."""

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import nbformat
import pytest
from job import interpreter
from nbclient import NotebookClient
from repository import ROOT
from run_cases import CHARACTERS, agent_table, write_config

from hacpo_mega import load_config, train
from hacpo_mega.logbook.files.metrics import read_metrics

pytestmark = pytest.mark.nightly


@pytest.fixture
def config_file(tmp_path, monkeypatch) -> Path:
    python, environment = interpreter()
    monkeypatch.setattr(sys, "executable", python)  # of the ranks
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    agents = [agent_table(tmp_path, "a", "qwen3", (*CHARACTERS, *"\r\x0b\x0c\x1c\x85\u2028\u2029"))]
    return write_config(tmp_path, agents, algorithm={"method": "gspo"}, checkpoint={"every_steps": 1})


def test_a_run_from_python_shows_each_step_once_and_restores_the_caller(config_file):
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)}
    steps, answers, accuracies = {}, {}, {}

    def stop_after_one(step: int, _: object) -> None:
        if step == 1:
            raise LookupError("enough")

    with pytest.raises(LookupError, match="enough"):
        train(config_file, on_step=stop_after_one)
    config = load_config(config_file)
    done = train(
        config, on_step=steps.__setitem__, on_answers=answers.__setitem__, on_evaluation=accuracies.__setitem__
    )
    assert done.is_finished and list(done.agents) == ["a"]
    assert (done.agents["a"] / "config.json").is_file()
    written = read_metrics(config.run_dir / "metrics.jsonl")
    assert done.metrics == {step: line.values | line.timing for step, line in written.items()}
    # where the first call's run had its last checkpoint depends on when the exception struck
    assert list(steps) in ([0, 1, 2], [1, 2], [2]) and steps == {step: done.metrics[step] for step in steps}
    for step, prompts in answers.items():
        files = sorted((config.run_dir / "rollouts").glob(f"step_{step:06d}.*"))
        assert prompts == [json.loads(line) for file in files for line in file.read_bytes().split(b"\n")[:-1]]
    assert list(answers) == [step for step in steps if step > 0]
    assert accuracies[2] == {"a": done.metrics[2]["agent/a/eval/reward_mean"]}
    assert {number: signal.getsignal(number) for number in handlers} == handlers

    with pytest.raises(ValueError, match=r"num_steps was 2|has 2 steps done, num_steps is 1"):
        train(config_file, "num_steps=1")
    with pytest.raises(ValueError, match="overrides go with the path of a file"):
        train(config, "num_steps=3")


def test_ctrl_c_ends_the_ranks_and_raises_where_the_script_stands(config_file, tmp_path):
    """The program interrupts itself when step 1 is shown: a terminal would do the same to it alone."""
    program = f"""
        import os, signal, sys
        sys.executable = {sys.executable!r}
        import hacpo_mega
        try:
            hacpo_mega.train({str(config_file)!r}, "num_steps=500",
                             on_step=lambda step, _: os.kill(os.getpid(), signal.SIGINT))
        except KeyboardInterrupt:
            print("interrupted")
            sys.exit(7)
    """
    marked = {**os.environ, "STARTED_BY": str(tmp_path)}
    command = [os.environ.get("PLAIN_PYTHON", sys.executable), "-c", textwrap.dedent(program)]
    done = subprocess.run(command, env=marked, capture_output=True, text=True, cwd=ROOT, timeout=1200)
    assert (done.returncode, done.stdout.splitlines()[-1]) == (7, "interrupted"), done.stderr[-3000:]
    assert "Traceback" not in done.stderr
    assert not outlive(marked["STARTED_BY"])


def test_a_notebook_gets_results_and_an_interrupt_ends_the_ranks(config_file, tmp_path, monkeypatch):
    """nbclient runs it as Jupyter would, and interrupts the kernel, as its button does, once step 1 is shown."""
    shown = tmp_path / "step 1 is shown"
    first = f"""
        import sys
        from pathlib import Path
        sys.executable = {sys.executable!r}
        import hacpo_mega
        done = hacpo_mega.train({str(config_file)!r}, "num_steps=1")
        assert done.is_finished and (done.agents["a"] / "config.json").is_file()
        done.metrics[1]["agent/a/reward_mean"]
    """
    second = f"""
        try:
            hacpo_mega.train({str(config_file)!r}, "num_steps=500", fresh=True,
                             on_step=lambda step, _: Path({str(shown)!r}).touch())
        except KeyboardInterrupt:
            print("interrupted")
    """
    cells = [nbformat.v4.new_code_cell(textwrap.dedent(cell).strip()) for cell in (first, second)]
    client = NotebookClient(nbformat.v4.new_notebook(cells=cells), timeout=600, startup_timeout=600)
    # ipykernel shows what other processes write, such as ranks, but not under pytest
    marked = {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"}
    marked["STARTED_BY"] = str(tmp_path)
    monkeypatch.setattr(sys, "executable", os.environ.get("PLAIN_PYTHON", sys.executable))  # of the kernel

    async def play() -> None:
        playing = asyncio.create_task(client.async_execute(env=marked, cwd=str(ROOT)))
        while not shown.exists() and not playing.done():
            await asyncio.sleep(0.1)
        if not playing.done():
            await client.km.interrupt_kernel()
        await playing

    asyncio.run(play())
    trained, interrupted = (cell.outputs for cell in client.nb.cells)
    metrics = read_metrics(next(tmp_path.glob("run.*/metrics.jsonl")))  # the second cell has put it aside
    assert [output.data["text/plain"] for output in trained if output.output_type == "execute_result"] == [
        repr(metrics[1].values["agent/a/reward_mean"])
    ]
    written, told = ("".join(output.get("text", "") for output in outputs) for outputs in (trained, interrupted))
    # graded rewards are called so once one of them is neither 0 nor 1
    assert re.search(r"\nstep 1/1 \| a .*(held-out|accuracy) ", written), written
    assert "\ndone: the models are in" in written and "\x1b" not in written
    assert "interrupted" in told.splitlines() and "was told to end (SIGINT)" in told
    assert not outlive(str(tmp_path))


def test_the_example_of_the_reference_runs(config_file):
    program = f"""
        import runpy, sys
        sys.executable, sys.argv = {sys.executable!r}, ["example.py", {str(config_file)!r}, "num_steps=1"]
        runpy.run_path("docs/reference/example.py", run_name="__main__")
    """
    command = [os.environ.get("PLAIN_PYTHON", sys.executable), "-c", textwrap.dedent(program)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=1200)
    assert done.returncode == 0, done.stderr[-3000:]
    folder = load_config(config_file).run_dir / "agents" / "a"
    assert re.search(r"^1 a \d\.\d{3}$", done.stdout, re.MULTILINE), done.stdout
    assert "1 first answer: " in done.stdout, done.stdout
    assert done.stdout.splitlines()[-1] == f"a is in {folder} and loads with transformers or vLLM"


def test_a_rank_under_torchrun_needs_no_variable(config_file, tmp_path):
    """With a real interpreter and torch's own launcher, as a user would; the ranks of a job take one each."""
    script = tmp_path / "rank.py"
    script.write_text(
        "import sys\nfrom hacpo_mega import Trainer, load_config\n"
        "with Trainer(load_config(sys.argv[1], ['num_steps=1'])) as trainer:\n    assert trainer.fit()\n"
        "try:\n    Trainer(sys.argv[1])\nexcept TypeError as error:\n    assert 'load_config(PATH)' in str(error)\n"
        "else:\n    sys.exit('a path is no configuration')\n"
    )
    plain = os.environ.get("PLAIN_PYTHON", sys.executable)
    command = [plain, "-m", "torch.distributed.run", "--standalone", str(script), str(config_file)]
    without = {name: value for name, value in os.environ.items() if not name.startswith(("VLLM_", "HF_"))}
    done = subprocess.run(command, env=without, capture_output=True, text=True, cwd=ROOT, timeout=1200)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "done: the models are in" in done.stdout


def outlive(mark: str) -> list[str]:
    """The command lines of processes with `mark` in their environment, after the time that a crowded machine needs."""
    for _ in range(150):
        left = [process for process in Path("/proc").glob("[0-9]*") if mark in read_text(process / "environ")]
        if not left:
            break
        time.sleep(0.1)
    return [f"{process.name}: {read_text(process / 'cmdline')}" for process in left]


def read_text(file: Path) -> str:
    try:
        return file.read_text(errors="replace")
    except OSError:  # the process has ended meanwhile
        return ""
