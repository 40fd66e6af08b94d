"""verifiers' side of launch/verifiers/program.py, for an interpreter of verifiers' own environment.

    episodes.py rows TASKSET [HARNESS]     data rows of a taskset, as JSON Lines
    episodes.py serve SOCKET               plays an episode for each connection, all at once, until its input ends

An order is a line {"taskset", "task", "harness", "base_url", "api_key"}, its reply a line {"reward"} or {"error"}. A
harness runs as processes of this machine, without the compaction that would rewrite a history. verifiers prepares its
programs with uv, which fetches them from an index once.
"""

import asyncio
import json
import os
import shutil
import sys
import urllib.request
from contextlib import AsyncExitStack
from typing import Any

sys.path[0] = os.getcwd()  # where a taskset of one's own may lie, in place of this file's folder
os.environ["PATH"] = f"{os.path.dirname(sys.executable)}:{os.environ.get('PATH', '')}"  # uv's place

import verifiers.v1 as vf  # noqa: E402

Order = dict[str, Any]


def environment_of(order: Order) -> vf.SingleAgentEnv:
    """The environment of a taskset and a harness."""
    named = order.get("harness", "null")
    harness = dict(named) if isinstance(named, dict) else {"id": named}
    if harness["id"] == "bash":
        harness.setdefault("compaction", None)
    agent = {"harness": harness, "runtime": {"type": "subprocess"}}
    return vf.SingleAgentEnv(vf.SingleAgentEnvConfig(taskset={"id": order["taskset"]}, agent=agent))


class Episodes:
    """Plays episodes; those of one taskset and harness share an environment."""

    def __init__(self, stack: AsyncExitStack) -> None:
        self._stack = stack
        self._environments: dict[str, tuple[vf.SingleAgentEnv, list[Any]]] = {}
        self._lock = asyncio.Lock()
        self._number = 0

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Replies to the order of one connection."""
        try:
            reply = {"reward": await self._reward(json.loads(await reader.readline()))}
        except Exception as error:
            reply = {"error": " ".join(f"{type(error).__name__}: {error}".split())[:1000]}
        writer.write(json.dumps(reply).encode() + b"\n")
        await writer.drain()
        writer.close()

    async def _reward(self, order: Order) -> float:
        """Plays one episode. RuntimeError for one that fails."""
        environment, tasks = await self._environment(order)
        self._number += 1
        key = f"HACPO_MEGA_CONVERSATION_{self._number}"
        os.environ[key] = order["api_key"]
        try:
            client = vf.EvalClientConfig(base_url=order["base_url"], api_key_var=key)
            model = await asyncio.to_thread(model_of, order)
            context = vf.ModelContext(model=model, client=client, sampling=vf.SamplingConfig())
            episode = await environment.run_episode(tasks[order["task"]], context)
        finally:
            del os.environ[key]
        (trace,) = episode.traces
        if errors := [*map(str, episode.errors), *(f"{error.type}: {error.message}" for error in trace.errors)]:
            raise RuntimeError("; ".join(errors))
        return trace.reward

    async def _environment(self, order: Order) -> tuple[vf.SingleAgentEnv, list[Any]]:
        name = json.dumps([order["taskset"], order["harness"]], sort_keys=True)
        async with self._lock:
            if name not in self._environments:
                environment = environment_of(order)
                await self._stack.enter_async_context(environment.serving())
                self._environments[name] = environment, list(environment.taskset)
        return self._environments[name]


def model_of(order: Order) -> str:
    """The name of the only model at an address."""
    headers = {"Authorization": f"Bearer {order['api_key']}"}
    with urllib.request.urlopen(urllib.request.Request(f"{order['base_url']}/models", headers=headers)) as answer:
        return json.load(answer)["data"][0]["id"]


async def serve(path: str) -> None:
    """Takes orders until standard input ends, with the processes that hold its other end."""
    replies, sys.stdout = sys.stdout, sys.stderr  # what verifiers prints is no reply
    async with AsyncExitStack() as stack:
        server = await asyncio.start_unix_server(Episodes(stack).answer, path)
        stack.callback(server.close)
        print("ready", file=replies, flush=True)
        await asyncio.to_thread(sys.stdin.read)
    shutil.rmtree(os.path.dirname(path), ignore_errors=True)


async def rows(taskset: str, harness: str = "null") -> None:
    """Prints a data row for every task."""
    for number, task in enumerate(environment_of({"taskset": taskset, "harness": harness}).taskset):
        prompt = task.data.prompt if isinstance(task.data.prompt, str) else json.dumps(task.data.prompt, default=str)
        row = {"prompt": prompt, "answer": "by the taskset", "taskset": taskset, "task": number, "harness": harness}
        print(json.dumps(row))


if __name__ == "__main__":
    asyncio.run({"serve": serve, "rows": rows}[sys.argv[1]](*sys.argv[2:]))
