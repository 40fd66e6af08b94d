"""A run with offload in which every rank notes where the optimizer's state is as its agent goes through its steps.

`main` on every rank writes what it noted to FOLDER/<rank>.json: (method, where before, where after), in order; and of
the engine's waking (wake, with or without its cache, where).
"""

import json
import os
from pathlib import Path

from job import play_command

from hacpo_mega.agent.agent import Agent
from hacpo_mega.agent.rollout_client import RolloutClient
from hacpo_mega.rollout.engine import Engine

METHODS = {
    **dict.fromkeys(("roll_out", "answer_once", "publish_weights", "verify_weights"), RolloutClient),
    **dict.fromkeys(("diagnose", "score", "learn", "save"), Agent),
}


def main(config: Path, folder: Path, *overrides: str) -> None:
    """Trains `config` to its end."""
    rank, noted, owners = os.environ["RANK"], [], []
    for name, owner in METHODS.items():
        setattr(owner, name, noting(getattr(owner, name), noted, owners))
    wake = Engine.wake

    def noted_wake(engine: Engine, *, cache: bool = True) -> None:
        noted.append(("wake", "cache" if cache else "weights", residence_of(owners[-1])))
        wake(engine, cache=cache)

    Engine.wake = noted_wake
    play_command("train", str(config), *overrides)
    (folder / f"{rank}.json").write_text(json.dumps(noted))


def residence_of(owner: Agent | RolloutClient) -> str:
    """Where the state of the optimizer is."""
    return getattr(owner, "rollout", owner).devices._state.residence.name


def noting(original, noted: list, owners: list):
    """A method of the agent or its rollout side that does what it did, and notes it."""

    def method(owner: Agent | RolloutClient, *arguments, **options):
        owners.append(owner)
        before = residence_of(owner)
        answer = original(owner, *arguments, **options)
        noted.append((original.__name__, before, residence_of(owner)))
        return answer

    return method
