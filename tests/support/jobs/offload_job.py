"""A run with offload in which every rank notes where the optimizer's state is as its agent goes through its steps.

`main` on every rank writes what it noted to FOLDER/<rank>.json: (method, where before, where after), in order; and of
the engine's waking (wake, with or without its cache, where).
"""

import json
import os
from pathlib import Path

from job import play_command

from hacpo_mega.agent.agent import Agent
from hacpo_mega.agent.scoring import Scoring
from hacpo_mega.rollout.engine import Engine

METHODS = ("roll_out", "answer_greedily", "diagnose", "learn", "publish_weights", "verify_weights", "save")


def main(config: Path, folder: Path, *overrides: str) -> None:
    """Trains `config` to its end."""
    rank, noted, agents = os.environ["RANK"], [], []
    for name in METHODS:
        setattr(Agent, name, noting(name, noted, agents))
    wake, before_learning = Engine.wake, Scoring.before_learning

    def noted_wake(engine: Engine, *, cache: bool = True) -> None:
        noted.append(("wake", "cache" if cache else "weights", agents[-1].offload.residence.name))
        wake(engine, cache=cache)

    def noted_score(scoring: Scoring, *asked) -> list:
        before = agents[-1].offload.residence.name
        scores = before_learning(scoring, *asked)
        noted.append(("score", before, agents[-1].offload.residence.name))
        return scores

    Engine.wake, Scoring.before_learning = noted_wake, noted_score
    play_command("train", str(config), *overrides)
    (folder / f"{rank}.json").write_text(json.dumps(noted))


def noting(name: str, noted: list, agents: list):
    """A method of Agent that does what it did, and notes it."""
    original = getattr(Agent, name)

    def method(agent: Agent, *arguments, **options):
        agents.append(agent)
        before = agent.offload.residence.name
        answer = original(agent, *arguments, **options)
        noted.append((name, before, agent.offload.residence.name))
        return answer

    return method
