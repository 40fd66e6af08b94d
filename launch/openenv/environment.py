"""Environments of OpenEnv in a run: every conversation is a session of an OpenEnv server, over its WebSocket.

    [conversation]
    environment = "launch/openenv/environment.py:OpenEnv"

OPENENV_URL names the server, such as http://127.0.0.1:8000. It runs in an environment or a container of its own; this
module imports nothing of OpenEnv. A session has an instance of the environment, so max_concurrent_envs of the server
bounds the conversations under way (256 a rank at most). Messages: openenv 0.10, core/env_server/http_server.py.
"""

import json
import os
import random
import urllib.request
from typing import Any
from urllib.parse import urlsplit

from websockets.sync.client import ClientConnection, connect

from hacpo_mega.conversations import Responder

LIMIT_S = 60.0  # to connect, and for the schema
MOST_BYTES = 2**20  # of an observation


class OpenEnv(Responder):
    """A session of the server: an own turn is an action, an observation is the answer, rewards of steps add up.

    An action with one text field is that text; any other is the turn's JSON object. A turn that is no action is
    answered with the server's complaint.
    """

    def __init__(self) -> None:
        """RuntimeError without OPENENV_URL, or if no OpenEnv server answers there."""
        if not (url := os.environ.get("OPENENV_URL", "").rstrip("/")):
            raise RuntimeError("OPENENV_URL is not set; give the server's address, such as http://127.0.0.1:8000")
        # The environment's proxy is not asked for a server on this machine: its 127.0.0.1 is another one.
        is_here = urlsplit(url).hostname in ("127.0.0.1", "localhost", "::1")
        opener = urllib.request.build_opener(*[urllib.request.ProxyHandler({})] * is_here)
        try:
            with opener.open(f"{url}/schema", timeout=LIMIT_S) as reply:
                action = json.loads(reply.read(MOST_BYTES))["action"]["properties"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise RuntimeError(f"OPENENV_URL = {url!r} has no schema of an OpenEnv server: {error}") from error
        fields = {name: field for name, field in action.items() if name != "metadata"}
        is_text = [field.get("type") for field in fields.values()] == ["string"]
        self._text_field = next(iter(fields)) if is_text else None
        self._address, self._proxy = f"ws{url.removeprefix('http')}/ws", None if is_here else True
        self._socket: ClientConnection | None = None

    def reset(self, reset: dict[str, Any] | None = None, **_row: Any) -> str:
        """Begins an episode with the arguments `reset` of the data row, and a seed of the conversation's own."""
        if self._socket is not None:
            self._socket.close()
        self._rewards: list[float] = []
        self._socket = connect(self._address, open_timeout=LIMIT_S, max_size=MOST_BYTES, proxy=self._proxy)
        return self._ask("reset", {"seed": random.getrandbits(31)} | (reset or {}))

    def respond(self, messages: list[dict[str, Any]]) -> list[dict[str, Any]] | None:
        """The observation after an own turn; None at the end of the episode."""
        if self._is_done:
            return None
        turn = messages[-1]["content"]
        try:
            action = json.loads(turn) if self._text_field is None else {self._text_field: turn}
        except ValueError:
            action = turn
        said = self._ask("step", action) if isinstance(action, dict) else "an action is a JSON object"
        return None if self._is_done else [{"role": "user", "content": said}]

    def get_reward(self) -> float | None:
        """The sum of the steps' rewards; None if no step had one. The session ends: a server has few."""
        self._socket.close()
        return sum(self._rewards) if self._rewards else None

    def _ask(self, kind: str, data: dict[str, Any]) -> str:
        """Sends a message, and returns the observation's text. RuntimeError for an error that is not the action's."""
        self._socket.send(json.dumps({"type": kind, "data": data}))
        reply = json.loads(self._socket.recv())
        said = reply["data"]
        if reply["type"] == "error":
            if kind == "step" and said.get("code") == "VALIDATION_ERROR":
                return str(said["message"])
            raise RuntimeError(f"the OpenEnv server answers {kind}: {said.get('message')} ({said.get('code')})")
        self._is_done = bool(said["done"])
        if said["reward"] is not None:
            self._rewards.append(float(said["reward"]))
        observed = {name: value for name, value in said["observation"].items() if name != "metadata"}
        texts = [value for value in observed.values() if isinstance(value, str)]
        return texts[0] if len(observed) == len(texts) == 1 else json.dumps(observed)
