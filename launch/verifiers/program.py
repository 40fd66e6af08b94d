"""Tasksets of verifiers as the environment of a run: every conversation is an episode that verifiers plays unchanged.

    [conversation]
    environment = "launch/verifiers/program.py:Verifiers"
    [data]
    files = ["tasks.jsonl"]     # build/verifiers-env/bin/python launch/verifiers/episodes.py rows TASKSET > tasks.jsonl

verifiers lives in an environment of its own (`make verifiers-env`; VERIFIERS_PYTHON names another interpreter). This
module starts one process of it as it is imported, for all conversations of a rank; it ends with the last of their
processes. It reaches the model over each conversation's address alone, so the run has its record of the tokens. Not
here: verifiers itself (episodes.py).
"""

import json
import os
import socket
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from hacpo_mega.conversations import AgentProgram

FOLDER = Path(__file__).resolve().parent
PYTHON = Path(os.environ.get("VERIFIERS_PYTHON", FOLDER.parents[1] / "build/verifiers-env/bin/python"))


def _start() -> Path:
    """Starts verifiers, and returns the socket at which it takes orders, in a folder that no other user enters."""
    if not PYTHON.exists():
        raise RuntimeError(f"{PYTHON} is not there: `make verifiers-env` makes it, or VERIFIERS_PYTHON names another")
    path = Path(tempfile.mkdtemp(prefix="verifiers-")) / "socket"
    # verifiers lives as long as a process holds the pipe's other end: this process, and those that it forks.
    command = [PYTHON, FOLDER / "episodes.py", "serve", path]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    if process.stdout.readline().strip() != "ready":
        raise RuntimeError(f"{PYTHON} cannot import verifiers; its reason stands above")
    return path


SOCKET = _start()


class Verifiers(AgentProgram):
    """Episodes of verifiers, one after the other."""

    def reset(self, taskset: str, task: int, harness: str | dict[str, Any] = "null", **_row: Any) -> None:
        """Chooses task number `task` of a taskset, and the harness that plays it: its name, or a table with its id."""
        self._row = {"taskset": taskset, "task": task, "harness": harness}
        self._reward: float | None = None

    def play(self, base_url: str, api_key: str) -> None:
        """Plays the episode. RuntimeError for one that fails, with what verifiers says of it."""
        order = self._row | {"base_url": base_url, "api_key": api_key}
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(str(SOCKET))
            connection.sendall(json.dumps(order).encode() + b"\n")
            reply = json.loads(connection.makefile().readline() or '{"error": "verifiers has ended"}')
        if "error" in reply:
            raise RuntimeError(reply["error"])
        self._reward = reply["reward"]

    def get_reward(self) -> float | None:
        """The reward of the episode's trace."""
        return self._reward
