"""An OpenEnv server plays conversations, by launch/openenv; skipped where OpenEnv is absent (make openenv-env)."""

import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import tomli_w
from job import start_command
from repository import ROOT
from run_cases import CHARACTERS, agent_table

from hacpo_mega.logbook.files.metrics import read_metrics
from hacpo_mega.logbook.files.rollout_log import read_rollouts

PYTHON = Path(os.environ.get("OPENENV_PYTHON", ROOT / "build/openenv-env/bin/python"))
LAUNCH = ROOT / "launch/openenv"
SERVER = """
import sys
import uvicorn
from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app

class Said(Action):
    text: str

class Heard(Observation):
    text: str

class Count(Action):
    number: int
    text: str = ""

class Digits(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed=None, episode_id=None, digit="1", **_):
        self.digit, self.turns = digit, 0
        return Heard(text=digit)

    def step(self, action, timeout_s=None, **_):
        self.turns += 1
        if "!" in action.text:
            raise KeyError(action.text)
        reward = action.text.count(self.digit) / 8
        return Heard(text=str(self.turns), reward=reward, done=self.turns == 2)

    @property
    def state(self):
        return State(step_count=self.turns)

action = {"said": Said, "count": Count}[sys.argv[2]]
uvicorn.run(create_fastapi_app(Digits, action, Heard, max_concurrent_envs=64), port=int(sys.argv[1]), log_level="error")
"""
TASKS = """{"prompt": "12+", "answer": "-", "reset": {"digit": "2"}}
{"prompt": "1+", "answer": "-", "reset": {}}
"""
pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(not PYTHON.exists(), reason=f"{PYTHON} is not there: make openenv-env makes it"),
]


@pytest.fixture
def server(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The address of a server whose actions are of the parameter's kind, in OPENENV_URL, too."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    process = subprocess.Popen([PYTHON, "-c", SERVER, str(port), getattr(request, "param", "said")])
    try:
        address = f"http://127.0.0.1:{port}"
        while process.poll() is None:
            with suppress(OSError), urllib.request.urlopen(f"{address}/health"):
                break
            time.sleep(0.1)
        monkeypatch.setenv("OPENENV_URL", address)
        monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")  # nobody is there
        monkeypatch.delenv("no_proxy", raising=False)
        monkeypatch.delenv("NO_PROXY", raising=False)
        yield address
    finally:
        process.kill()
        process.wait()


def openenv(monkeypatch: pytest.MonkeyPatch):
    """The class, as a run imports it."""
    monkeypatch.syspath_prepend(LAUNCH)
    monkeypatch.delitem(sys.modules, "environment", raising=False)
    from environment import OpenEnv

    return OpenEnv


def test_a_run_is_rewarded_by_the_server(tmp_path, monkeypatch, server):
    """Two agents, one step. The server's reward is counted again in the turns that the run has logged."""
    monkeypatch.chdir(tmp_path)
    Path("tasks.jsonl").write_text(TASKS)
    agents = [agent_table(tmp_path, name, "qwen3", CHARACTERS) for name in ("one", "two")]
    table = {
        **{"run_dir": str(tmp_path / "run"), "seed": 7, "num_steps": 1, "agents": agents},
        "conversation": {
            "environment": f"{LAUNCH / 'environment.py'}:OpenEnv",
            **{"max_turns": 3, "max_total_tokens": 60},
        },
        "algorithm": {"method": "hacpo", "delta": 0.9},
        "data": {"files": ["tasks.jsonl"]},
        "rollout": {"rollouts_per_prompt": 4, "max_prompt_tokens": 8, "max_answer_tokens": 16},
        "training": {"prompts_per_step": 2, "prompts_per_update": 2, "max_tokens_per_microbatch": 4096},
        "checkpoint": {"every_steps": 0, "every_minutes": 0.0},
        "logging": {"report": "never"},
    }
    Path("run.toml").write_text(tomli_w.dumps(table))
    command = start_command("train", tmp_path / "run.toml")  # with the server's address, which a forked rank has not
    assert command.wait(600) == 0, command.communicate()
    answers = [(prompt, answer) for prompt in read_rollouts(tmp_path / "run", 1) for answer in prompt["answers"]]
    assert len(answers) == 16 and len({answer["reward"] for _, answer in answers}) > 2
    for prompt, answer in answers:
        heard = [turn["content"] for turn in answer["turns"] if turn.get("stop") == "eos"]  # a cut turn goes nowhere
        digit = "2" if prompt["prompt"].startswith("12+") else "1"
        assert answer["reward"] == sum(turn.count(digit) for turn in heard) / 8
        assert [turn["content"] for turn in answer["turns"] if turn["role"] == "user"] == ["1"][: len(heard)]
    values = read_metrics(tmp_path / "run/metrics.jsonl")[1].values
    for name in ("one", "two"):
        assert values[f"agent/{name}/conversation/failed_mean"] == 0
        assert 1 < values[f"agent/{name}/conversation/turns_mean"] <= 2


def test_a_turn_is_the_text_of_the_action(monkeypatch, server):
    environment = openenv(monkeypatch)()
    assert environment.reset(reset={"digit": "2"}, prompt="unused") == "2"
    assert environment.respond([{"role": "assistant", "content": "22"}]) == [{"role": "user", "content": "1"}]
    assert environment.respond([{"role": "assistant", "content": "1"}]) is None
    assert environment.get_reward() == 0.25
    assert (environment.reset(), environment.get_reward()) == ("1", None)
    environment.reset()
    with pytest.raises(RuntimeError, match=r"the OpenEnv server answers step: .*EXECUTION_ERROR"):
        environment.respond([{"role": "assistant", "content": "!"}])


@pytest.mark.parametrize("server", ["count"], indirect=True)
def test_an_action_of_several_fields_is_json(monkeypatch, server):
    environment = openenv(monkeypatch)()
    environment.reset()
    refused = {"[1]": "an action is a JSON object", "1": "a JSON object", "{": "a JSON object", "{}": "Invalid"}
    for turn, said in refused.items():
        (message,) = environment.respond([{"role": "assistant", "content": turn}])
        assert said in message["content"]
    assert environment.respond([{"role": "assistant", "content": '{"number": 1}'}])[0]["content"] == "1"


def test_no_server_is_one_line(monkeypatch, server):
    """A server that is no OpenEnv's, such as a folder's, has no schema."""
    kind = openenv(monkeypatch)
    refused = {"": "OPENENV_URL is not set", f"{server}/docs": "has no schema of an OpenEnv server"}
    for address, complaint in refused.items():
        monkeypatch.setenv("OPENENV_URL", address)
        with pytest.raises(RuntimeError, match=complaint) as said:
            kind()
        assert "\n" not in str(said.value)
