"""A rank of a run with an engine on a rank of its own, which meets a fate: jobs/test_apart_faults.py."""

import os
import signal
from contextlib import suppress
from pathlib import Path

from job import play_command

from hacpo_mega.agent.weight_sync import WeightSync
from hacpo_mega.rollout.engine import Engine
from hacpo_mega.rollout.weights.engine_weights import EngineWeights


def fated(fate: str, step: int, folder: Path, *arguments: str) -> None:
    """`hacpo-mega ARGUMENTS`, in which the engine's rank meets `fate` as it takes the weights after `step`.

    refuses   it is given a layer that it does not take; what it says of answers then is in `folder`/after.txt
    killed    it is killed when it has taken half of the layers
    stopped   it is stopped when it has begun the answers of the step after, and writes `folder`/stopped; its first
              feed-forward it takes from full tensors alone, as an engine that quantizes would
    """
    if os.environ["RANK"] == "1":
        publish, finish, generate = WeightSync.publish, EngineWeights.finish, Engine.generate
        now, taken = [0], []

        def publishing(self: WeightSync, of_step: int) -> None:
            now[0] = of_step
            try:
                publish(self, of_step)
            except RuntimeError:
                (folder / "after.txt").write_text("\n".join(_refusals(self, of_step)))
                raise

        def finishing(self: EngineWeights, *given, **how) -> None:
            taken.append(now[0])
            if now[0] == step and taken.count(step) == 3:
                if fate == "refuses":
                    raise RuntimeError("this engine takes no such weight")
                if fate == "killed":
                    os.kill(os.getpid(), signal.SIGKILL)
            finish(self, *given, **how)

        def generating(self: Engine, *given, **how) -> list:
            if fate == "stopped" and now[0] == step and not (folder / "stopped").exists():
                (folder / "stopped").touch()
                os.kill(os.getpid(), signal.SIGSTOP)
            return generate(self, *given, **how)

        problem = EngineWeights._problem

        def looking(self: EngineWeights, path: tuple[str, str], parts: list) -> str | None:
            is_whole = fate == "stopped" and path[0] == "model.layers.0.mlp.gate_up_proj"
            return "it is told so" if is_whole else problem(self, path, parts)

        WeightSync.publish, EngineWeights.finish, Engine.generate = publishing, finishing, generating
        EngineWeights._problem = looking
    play_command(*arguments)


def _refusals(weight_sync: WeightSync, step: int) -> list[str]:
    said = []
    for ask in (lambda: weight_sync.require_step(step), lambda: weight_sync._engine.generate([[1]], [0], max_tokens=1)):
        with suppress(RuntimeError):
            try:
                ask()
                said.append("it answers")
            except RuntimeError as error:
                said.append(str(error))
                raise
    return said
