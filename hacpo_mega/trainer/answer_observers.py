"""Observers of a step's answers: the user's own metrics, and tables for trackers."""

import inspect
import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, SupportsFloat

from hacpo_mega.agent.agent import Agent
from hacpo_mega.config.named_function import named_function
from hacpo_mega.logbook.console import warn
from hacpo_mega.logbook.files.metrics import Metrics
from hacpo_mega.logbook.files.trackers import Trackers
from hacpo_mega.logbook.step_report import StepResult
from hacpo_mega.records import Pool
from hacpo_mega.trainer.observers import Observer

COLUMNS = ("prompt", "gold", "agent", "answer", "reward", "verdict", "num_tokens")
MOST_CHARACTERS = 2000  # of a text in a tracker's table


class OwnMetrics(Observer):
    """logging.metrics: mean of a user function over an agent's answers, logged as agent/NAME/own/FUNCTION.

    A function is called for every answer of a step. Its parameters name what it gets: any of COLUMNS (`reward` is NaN
    for an unjudged answer), `step`, `row`, or a field of the row. It returns a number, or None to leave the answer out.
    A failing function is reported once and its metric omitted; it never aborts training.
    """

    def __init__(self, names: Sequence[str]) -> None:
        """ValueError for a function that cannot be loaded."""
        self._functions = {name.rpartition(":")[2]: named_function(name) for name in names}
        self._complained: set[str] = set()

    def joins(self, agent: Agent, metrics: Metrics) -> None:
        """Notes the agent and its metrics; only the leader of a cell counts answers."""
        self._agent, self._metrics = agent, metrics

    def before_writing(self, step: int, found: StepResult) -> None:
        """Adds the numbers of this cell's answers."""
        if not self._agent.place.is_leader:
            return
        prompts = {prompt.index: prompt for prompt in found.pool.prompts}
        for trajectory in found.trajectories:
            prompt = prompts[trajectory.rollout.prompt_index]
            row = json.loads(prompt.row) if prompt.row else {}
            known = row | _columns(prompt.text, prompt.gold, self._agent.name, trajectory) | {"row": row, "step": step}
            for name, function in self._functions.items():
                self._add(name, function, known)

    def _add(self, name: str, function: Callable, known: Mapping[str, Any]) -> None:
        try:
            wanted = inspect.signature(function).parameters
            missing = [key for key, p in wanted.items() if key not in known and p.default is p.empty]
            if missing:
                raise ValueError(f"it asks for {missing[0]!r}; known here: {', '.join(known)}")
            value = function(**{key: known[key] for key in wanted if key in known})
            if value is not None and not (isinstance(value, SupportsFloat) and math.isfinite(float(value))):
                raise ValueError(f"it returned {value!r:.80}, which is no finite number")
        except Exception as error:
            if name not in self._complained:
                self._complained.add(name)
                reason = f"{type(error).__name__}: {error}".splitlines()[0]
                warn(f"logging.metrics: {name} failed ({reason}); this is said once, training goes on")
            return
        if value is not None:
            self._metrics.add(f"agent/{self._agent.name}/own/{name}", float(value), 1)


class TrackedAnswers(Observer):
    """Sends trackers the answers to a step's first prompts, and the spread of rewards and lengths, from rank 0."""

    def __init__(self, trackers: Trackers, num_prompts: int, names: Sequence[str]) -> None:
        self._trackers, self._num_prompts, self._names = trackers, num_prompts, tuple(names)

    def before_writing(self, step: int, found: StepResult) -> None:
        """Sends the answers of this rank's lane."""
        rows = [list(row.values()) for row in _rows(found.pool.part(slice(self._num_prompts)), self._names)]
        spread: dict[str, list[float]] = {}
        for name, answers in zip(self._names, zip(*found.pool.trajectories_PNG)):
            of_agent = [trajectory for group in answers for trajectory in group]
            spread[f"agent/{name}/rewards"] = [t.reward for t in of_agent if t.is_judged]
            spread[f"agent/{name}/answer_tokens"] = [float(len(t.rollout.token_ids)) for t in of_agent]
        self._trackers.show(step, COLUMNS, rows, {name: values for name, values in spread.items() if values})


def _rows(pool: Pool, names: Sequence[str]) -> list[dict[str, Any]]:
    return [
        {
            key: value[:MOST_CHARACTERS] if isinstance(value, str) else value
            for key, value in _columns(prompt.text, prompt.gold, name, trajectory).items()
        }
        for prompt, by_agent in zip(pool.prompts, pool.trajectories_PNG)
        for name, group in zip(names, by_agent)
        for trajectory in group
    ]


def _columns(prompt: str, gold: str, agent: str, trajectory: Any) -> dict[str, Any]:
    """One answer as a mapping from COLUMNS."""
    rollout = trajectory.rollout
    verdict, num_tokens = trajectory.verdict.name.lower(), len(rollout.token_ids)
    return dict(zip(COLUMNS, (prompt, gold, agent, rollout.text, trajectory.reward, verdict, num_tokens), strict=True))
