"""Tasksets of verifiers in a run, by launch/verifiers; skipped where verifiers is absent (make verifiers-env)."""

import os
import subprocess
import tempfile
import time
from pathlib import Path

import pytest
import tomli_w
from repository import ROOT
from run_cases import train
from tiny_models import make_model
from turn_cases import CASES, ByHand

from hacpo_mega.logbook.files.metrics import read_metrics
from hacpo_mega.logbook.files.rollout_log import read_rollouts

PYTHON = Path(os.environ.get("VERIFIERS_PYTHON", ROOT / "build/verifiers-env/bin/python"))
LAUNCH = ROOT / "launch/verifiers"
TASKSET = """
import verifiers.v1 as vf

class Addition(vf.Task[vf.TaskData]):
    @vf.reward
    async def es(self, trace: vf.Trace) -> float:
        return min(1.0, str(trace.branches[0].messages[-1].content).count("e") / 16)

class AdditionTaskset(vf.Taskset[Addition]):
    def load(self):
        for i in range(4):
            yield Addition(vf.TaskData(prompt=f"what is {i}+2?", name=f"addition {i}"))

__all__ = ["AdditionTaskset"]
"""
pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(not PYTHON.exists(), reason=f"{PYTHON} is not there: make verifiers-env makes it"),
]


def rows(folder: Path, harness: str) -> list[str]:
    found = subprocess.run(
        [PYTHON, LAUNCH / "episodes.py", "rows", "additions", harness], cwd=folder, capture_output=True, text=True
    )
    assert found.returncode == 0, found.stderr[-2000:]
    return found.stdout.splitlines()


def test_episodes_of_verifiers_are_trained_and_rewarded(tmp_path, monkeypatch):
    """Two agents, one step: harness null for two tasks and bash, with its long system prompt, for two others.

    verifiers counts the letter e in what it has read in the trace, and the run logs what the engine has sampled.
    """
    monkeypatch.chdir(tmp_path)
    (tmp_path / "additions").mkdir()
    (tmp_path / "additions/__init__.py").write_text(TASKSET)
    Path("tasks.jsonl").write_text("\n".join([*rows(tmp_path, "null")[:2], *rows(tmp_path, "bash")[2:]]) + "\n")
    make_model(tmp_path / "chatty", "qwen3", num_heads=2, head_dim=32, vocab_size=400, max_positions=4096)
    said = Path("chatty/config.json").read_text()
    ByHand(tmp_path / "chatty").codec(CASES["chatml"])
    Path("chatty/config.json").write_text(said)
    agents = [
        {"name": name, "model": str(tmp_path / "chatty"), "optimizer": {"lr": 1e-4}, "chat_template": True}
        for name in ("one", "two")
    ]
    table = {
        **{"run_dir": str(tmp_path / "run"), "seed": 7, "num_steps": 1, "agents": agents},
        "conversation": {
            "environment": f"{LAUNCH / 'program.py'}:Verifiers",
            **{"max_turns": 4, "max_total_tokens": 2000, "turn_timeout_s": 600.0},
        },
        "algorithm": {"method": "hacpo", "delta": 0.9},
        "data": {"files": ["tasks.jsonl"]},
        "rollout": {"rollouts_per_prompt": 2, "max_prompt_tokens": 1500, "max_answer_tokens": 60},
        "training": {"prompts_per_step": 4, "prompts_per_update": 4, "max_tokens_per_microbatch": 8192},
        "checkpoint": {"every_steps": 0, "every_minutes": 0.0},
        "logging": {"report": "never"},
    }
    Path("run.toml").write_text(tomli_w.dumps(table))
    train(tmp_path / "run.toml")
    answers = [(prompt, answer) for prompt in read_rollouts(tmp_path / "run", 1) for answer in prompt["answers"]]
    assert len(answers) == 16 and {prompt["prompt"] for prompt, _ in answers} == {f"what is {i}+2?" for i in range(4)}
    for _, answer in answers:
        assert answer["reward"] == min(1.0, answer["turns"][-1]["content"].count("e") / 16)
    assert len({answer["reward"] for _, answer in answers}) > 3
    values = read_metrics(tmp_path / "run/metrics.jsonl")[1].values
    for name in ("one", "two"):
        assert values[f"agent/{name}/conversation/failed_mean"] == 0
        assert 0 < values[f"agent/{name}/engine_gap_max"] < 1e-4
    end = time.monotonic() + 60
    while folders := list(Path(tempfile.gettempdir()).glob("verifiers-*")):
        assert time.monotonic() < end, f"verifiers has not ended with the run: {folders}"
        time.sleep(0.1)
