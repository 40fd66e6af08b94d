"""Rollouts on disk: every prompt of a step with every agent's answers, as `rollouts/step_000012.lane_0003.jsonl`.

Each lane writes its own prompts, whole or not at all, so no lane waits for another.
A line is one prompt:
    {"step", "lane", "prompt_index", "id", "skill", "prompt" (text, or the messages of a chat), "gold",
     "tools" (their schemas, if it has any), "row" (other fields of its row, if it has any),
     "prompt_seen": {agent: what it reads, with its template and special tokens, where that is not the prompt},
     "prompt_token_ids": {agent: the ids of that}, with logging.rollout_tokens
     "answers": [
        {"agent", "rollout", "text", "reward" (null: unjudged), "verdict", "stop", "num_tokens", "mean_logprob" (nats),
         "advantage": {learner: number}, "ratio": {learner: number, in the update that trained it},
         "not_trained": {learner: why it is not: "too_long" and other DropReasons; "outside_band": it has no gradient},
         of a conversation "turns": [{"role", "content", "num_tokens", "name" of a tool, "stop" of own ones, "opened"
         (a <think> that the prompt wrote: the content continues it)}, ...], all after the prompt, "opening" (what its
         environment has added to the prompt), "task" (the prompt that a program has written), "counts" (what
         happened, by name: "failed" and why), and "text" of the last own turn, and with logging.rollout_tokens
         "tokens": [text of every token], "token_ids": [their ids for its own agent],
         "token_logprob": [nats of each trained one, before the step's first update],
         "token_ratio": [of each trained one, for its own agent in the update that trained it],
         "trained_places": [of these in a conversation; not given: the leading tokens]}, ...]}
Elsewhere: metrics, which are about many answers (metrics.py).
"""

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from hacpo_grading.texts.chat_messages import messages_of, messages_problem, messages_text, tools_of, tools_problem
from hacpo_mega.logbook.files.backlog import Backlog
from hacpo_mega.logbook.files.json_lines import (
    COUNT,
    NUMBER,
    TABLE,
    TEXT,
    FieldType,
    as_line,
    checked,
    is_number,
    json_lines,
    list_of,
    table_of,
)
from hacpo_mega.logbook.files.metrics import json_number

if TYPE_CHECKING:  # a report reads these files without torch
    from torch import Tensor

    from hacpo_mega.records import Pool, Trajectory, Turn


AnswerPlace = tuple[int, int, int]  # prompt index, source agent, rollout index
LINE = "a logged prompt"
PART = re.compile(r"step_\d+\.lane_\d+\.jsonl")
# The fields of a line, and of each of its answers; numbers of tokens are as `json_number` writes them.
TOKEN_NUMBER = FieldType("a number", lambda value: is_number(value) or value in ("nan", "inf", "-inf")).or_null
IDS = list_of(COUNT)
FIELDS = {
    **{"step": COUNT, "lane": COUNT, "prompt_index": COUNT, "id": TEXT, "skill": TEXT, "gold": TEXT},
    "prompt": FieldType(
        "text or messages",
        lambda value: isinstance(value, str) or (isinstance(value, list) and messages_problem(value) is None),
    ),
    "tools": FieldType("schemas of tools", lambda value: tools_problem(value) is None).if_given,
    "row": TABLE.if_given,
    "prompt_seen": table_of(TEXT).if_given,
    "prompt_token_ids": table_of(IDS).if_given,
    "answers": list_of(TABLE),
}
ANSWER_FIELDS = {
    **{"agent": TEXT, "rollout": COUNT, "text": TEXT, "reward": NUMBER.or_null, "verdict": TEXT, "stop": TEXT},
    **{"num_tokens": COUNT, "mean_logprob": NUMBER.or_null.if_given},
    **{"advantage": table_of(NUMBER), "ratio": table_of(NUMBER), "not_trained": table_of(TEXT).if_given},
    **{"turns": list_of(TABLE).if_given, "opening": TEXT.if_given, "task": TEXT.if_given, "counts": TABLE.if_given},
    **{"tokens": list_of(TEXT).if_given, "token_ids": IDS.if_given, "trained_places": IDS.if_given},
    **{"token_logprob": list_of(TOKEN_NUMBER).if_given, "token_ratio": list_of(TOKEN_NUMBER).if_given},
}


@dataclass(frozen=True)
class AnswerTokens:
    """The tokens of a rollout, ids and texts, with its agent's numbers for them; the last two cover the trained tokens.

    logprobs   before the step's first update, nats; None where the answer was not scored
    ratios     in the update that trained it over `logprobs`; None where it trained none
    places     of the trained tokens in a conversation; None: the leading ones
    """

    prompt_index: int
    rollout_index: int
    ids: tuple[int, ...]
    pieces: tuple[str, ...]
    logprobs: np.ndarray | None
    ratios: np.ndarray | None
    places: np.ndarray | None = None


@dataclass(frozen=True)
class AnswerNotes:
    """Notes of one learner on the answers in a lane's log.

    ratios         of every answer it was trained on here, by (prompt index, source agent, rollout index)
    prompts_seen   what its model reads for each prompt of the lane
    prompt_ids     the ids of that, and
    tokens         of the answers that its own cell gave; both empty unless the run logs tokens
    mean_logprobs  (prompt index, rollout index, nats) of own answers that were exchanged without a score
    not_trained    why it learns nothing from an answer, by (prompt index, source agent, rollout index)
    """

    ratios: Mapping[AnswerPlace, float]
    prompts_seen: tuple[str, ...]
    prompt_ids: tuple[tuple[int, ...], ...] = ()
    tokens: tuple[AnswerTokens, ...] = ()
    mean_logprobs: tuple[tuple[int, int, float], ...] = ()
    not_trained: Mapping[AnswerPlace, str] = field(default_factory=dict)


class RolloutLog:
    """The rollouts of one lane. Made and used by every cell leader of the lane.

    agents   names, in the order of the pool
    learner  the index of this leader's agent
    gather   collects one payload per leader of the lane, in rank order; called once per `write`. With one leader it
             is `lambda payload: [payload]`
    writes   whether this leader is the lane's writer (one per lane)
    backlog  keeps what cannot be written at present; by default one of this log's own
    """

    def __init__(
        self,
        run_dir: Path,
        lane: int,
        agents: tuple[str, ...],
        learner: int,
        gather: Callable[[bytes], list[bytes]],
        writes: bool,
        steps_done: int = 0,
        backlog: Backlog | None = None,
    ) -> None:
        self._folder = run_dir / "rollouts"
        self._lane = lane
        self._agents = agents
        self._learner = learner
        self._gather = gather
        self._writes = writes
        self._backlog = Backlog() if backlog is None else backlog
        if writes:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._drop_parts_after(steps_done)

    def write(self, step: int, pool: "Pool", advantages_PNG: "Tensor", notes: AnswerNotes) -> None:
        """Logs a step. Collective over the leaders of the lane, each with its own learner's numbers.

        advantages_PNG  what this learner trained with, float [P, N, G]
        notes           what else it knows
        """
        record = {
            "learner": self._agents[self._learner],
            "advantage": advantages_PNG.tolist(),
            "ratio": [(*place, ratio) for place, ratio in notes.ratios.items() if math.isfinite(ratio)],
            "not_trained": [(*place, reason) for place, reason in notes.not_trained.items()],
            "prompts_seen": list(notes.prompts_seen),
            "prompt_ids": list(notes.prompt_ids),
            "tokens": [_token_fields(answer) for answer in notes.tokens],
            "mean_logprob": [(p, g, {"mean_logprob": _finite(value)}) for p, g, value in notes.mean_logprobs],
        }
        records = [json.loads(payload) for payload in self._gather(json.dumps(record).encode())]
        if self._writes:
            path = self._folder / f"step_{step:06d}.lane_{self._lane:04d}.jsonl"
            self._backlog.replace(path, b"".join(map(as_line, self._lines(step, pool, records))))

    def _lines(self, step: int, pool: "Pool", records: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        tokens, scored = (
            {(r["learner"], *place): answer for r in records for *place, answer in r[kind]}
            for kind in ("tokens", "mean_logprob")
        )
        ratios, reasons = (_by_answer(records, kind) for kind in ("ratio", "not_trained"))
        for p, (prompt, by_agent) in enumerate(zip(pool.prompts, pool.trajectories_PNG)):
            answers = [
                _answer_fields(trajectory, self._agents[n])
                | scored.get((self._agents[n], prompt.index, g), {})
                | tokens.get((self._agents[n], prompt.index, g), {})
                | {
                    "advantage": _advantages(records, p, n, g),
                    "ratio": ratios.get((prompt.index, n, g), {}),
                    "not_trained": reasons.get((prompt.index, n, g), {}),
                }
                for n, group in enumerate(by_agent)
                for g, trajectory in enumerate(group)
            ]
            ids = {r["learner"]: r["prompt_ids"][p] for r in records if r["prompt_ids"]}
            yield {
                "step": step,
                "lane": self._lane,
                "prompt_index": prompt.index,
                "id": prompt.id,
                "skill": prompt.skill,
                **_prompt_fields(prompt.text),
                "gold": prompt.gold,
                **({"row": json.loads(prompt.row)} if prompt.row else {}),
                "prompt_seen": {
                    r["learner"]: r["prompts_seen"][p] for r in records if r["prompts_seen"][p] != prompt.text
                },
                **({"prompt_token_ids": ids} if ids else {}),
                "answers": answers,
            }

    def _drop_parts_after(self, steps_done: int) -> None:
        """A resumed run writes these steps again; with fewer lanes than before, parts would be left over."""
        for path in parts_in(self._folder):
            step, lane = place_of(path)
            if step > steps_done and (lane == self._lane or self._lane == 0):
                path.unlink(missing_ok=True)


def parts_in(folder: Path, step: str = "*") -> Iterator[Path]:
    """The parts in a folder, of one step where it is given; not what somebody's copy of a part is called."""
    return (path for path in folder.glob(f"step_{step}.lane_*.jsonl") if PART.fullmatch(path.name))


def place_of(path: Path) -> tuple[int, int]:
    """(step, lane) of a part, from its name."""
    step, lane = re.findall(r"\d+", path.name)
    return int(step), int(lane)


def _answer_fields(trajectory: "Trajectory", agent: str) -> dict[str, Any]:
    conversation = trajectory.rollout.conversation
    turns = {} if conversation is None else {"turns": [_turn_fields(turn) for turn in conversation.turns]}
    if conversation is not None:
        turns |= {key: text for key, text in (("opening", conversation.opening), ("task", conversation.task)) if text}
        counts = {key: count for key, count in conversation.counts.items() if key != "environment_ms"}  # not the clock
        turns |= {"counts": counts} if counts else {}
    return {
        **turns,
        "agent": agent,
        "rollout": trajectory.rollout.rollout_index,
        "text": trajectory.rollout.text,
        "reward": _finite(trajectory.reward),
        "verdict": trajectory.verdict.name.lower(),
        "stop": trajectory.rollout.stop.name.lower(),
        "num_tokens": len(trajectory.rollout.token_ids),
        "mean_logprob": _finite(trajectory.mean_logprob),
    }


def _turn_fields(turn: "Turn") -> dict[str, Any]:
    stop = {} if turn.stop is None else {"stop": turn.stop.name.lower()}
    opened = {"opened": turn.opened} if turn.opened else {}
    return {**turn.message, **opened, "num_tokens": turn.num_tokens, **stop}


def _token_fields(answer: AnswerTokens) -> tuple[int, int, dict[str, Any]]:
    """(prompt index, rollout index, what the log says of the answer's tokens)."""
    numbers = {"token_logprob": answer.logprobs, "token_ratio": answer.ratios}
    known = {name: [json_number(float(f"{x:.6g}")) for x in v.tolist()] for name, v in numbers.items() if v is not None}
    texts = {"tokens": list(answer.pieces), "token_ids": list(answer.ids)}
    if answer.places is not None:
        texts["trained_places"] = answer.places.tolist()
    return answer.prompt_index, answer.rollout_index, texts | known


def _prompt_fields(text: str) -> dict[str, Any]:
    """A prompt as its line has it; `prompt_text` is the inverse."""
    messages, tools = messages_of(text), tools_of(text)
    return {"prompt": text if messages is None else messages} | ({"tools": tools} if tools else {})


def prompt_text(line: Mapping[str, Any]) -> str:
    """The text that stood for the prompt of a logged line; lines of older runs have it as it was."""
    prompt = line["prompt"]
    return prompt if isinstance(prompt, str) else messages_text(prompt, line.get("tools", ()))


def _advantages(records: list[dict[str, Any]], p: int, n: int, g: int) -> dict[str, float]:
    """The advantages of one answer, by the learners that know it."""
    known = [(record["learner"], record["advantage"][p][n][g]) for record in records]
    return {learner: advantage for learner, advantage in known if math.isfinite(advantage)}


def _by_answer(records: list[dict[str, Any]], kind: str) -> dict[AnswerPlace, dict[str, Any]]:
    """By answer, the values of one kind of note by the learners that have one."""
    by_answer: dict[AnswerPlace, dict[str, Any]] = {}
    for record in records:
        for *place, value in record[kind]:
            by_answer.setdefault(tuple(place), {})[record["learner"]] = value
    return by_answer


def _finite(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None


def logged_steps(run_dir: Path) -> list[int]:
    """The steps that have rollouts on disk, ascending."""
    return sorted(logged_parts(run_dir))


def logged_parts(run_dir: Path) -> dict[int, set[int]]:
    """The lanes that have rollouts on disk, by step."""
    lanes: dict[int, set[int]] = {}
    for path in parts_in(run_dir / "rollouts"):
        step, lane = place_of(path)
        lanes.setdefault(step, set()).add(lane)
    return lanes


def read_rollouts(run_dir: Path, step: int) -> list[dict[str, Any]]:
    """The prompts of a step over all lanes, by prompt index. ValueError, with line and field, for another shape."""
    parts = sorted(parts_in(run_dir / "rollouts", f"{step:06d}"))
    prompts = [line for path in parts for _, _, line in read_part(path, run_dir)]
    return sorted(prompts, key=lambda prompt: prompt["prompt_index"])


def read_part(path: Path, run_dir: Path) -> Iterator[tuple[int, bytes, dict[str, Any]]]:
    """Number, text and content of the lines of one lane's file of a step. ValueError like `read_rollouts`."""
    return json_lines(path, LINE, logged_prompt, run_dir)


def logged_prompt(line: dict[str, Any]) -> dict[str, Any]:
    """The line. ValueError, with the field, for one that is no logged prompt."""
    for n, answer in enumerate(checked(line, FIELDS)["answers"]):
        checked(answer, ANSWER_FIELDS, f"answers[{n}].")
    return line
