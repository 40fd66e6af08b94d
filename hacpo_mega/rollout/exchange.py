"""The exchange: every answer to a lane's prompts, on every rank of the lane.

The leaders of a lane gather each other's trajectories (one round for sizes, one for bytes). Each shares them inside its
cell, and every rank assembles the same full cube. The bytes are those of wire.py, with the ROW below: reward and
log-prob keep all their bits, an unjudged reward is NaN, and a learner with the identical tokenizer keeps the source's
token ids.
A lone surrogate has no UTF-8 form and no tokenizer accepts one: it travels as U+FFFD, and a warning counts them.

Elsewhere: judging, scoring, re-encoding (samples/learner_view.py).
"""

import hashlib
import logging
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import repeat
from typing import NamedTuple

import numpy as np
import torch

from hacpo_mega.cluster.groups.tree import join, split
from hacpo_mega.cluster.place import Place
from hacpo_mega.cluster.rank_map import RankMap
from hacpo_mega.records import Completion, Judgement, Pool, Prompt, Rollout, Score, Stop, Trajectory, Verdict
from hacpo_mega.rollout import wire

ROW = np.dtype(
    [
        ("reward", "<f8"),
        ("mean_logprob", "<f8"),
        ("engine_weight", "<f8"),
        ("prompt_index", "<i8"),
        ("rollout_index", "<i4"),
        ("agent", "<i4"),
        ("num_scored", "<i4"),
        ("stop", "u1"),
        ("verdict", "u1"),
        ("is_conversation", "u1"),
    ]
)
JUDGED_ROW = np.dtype([("reward", "<f8"), ("text_hash", "<i8"), ("num_tokens", "<i4"), ("is_success", "u1")])
COMPLETION_ROW = np.dtype([("stop", "u1")])
MAX_NAMED = 5  # how many missing answers an error names before it only counts them

logger = logging.getLogger(__name__)


class SharedRewards(NamedTuple):
    """Judged answers of all agents to a lane's prompts, [P, N, G] each.

    rewards_PNG     float64, NaN where unjudged      successes_PNG   bool
    num_tokens_PNG  int64, in the source's tokens    text_hash_PNG   int64, equal for equal texts
    """

    rewards_PNG: torch.Tensor
    successes_PNG: torch.Tensor
    num_tokens_PNG: torch.Tensor
    text_hash_PNG: torch.Tensor


def share_rewards(
    judged: Sequence[Trajectory], num_prompts: int, place: Place, rollouts_per_prompt: int
) -> SharedRewards:
    """Rewards of all agents' answers to this lane's prompts, and what else is known of them before they travel.

    `judged` are this cell's answers, by prompt, then by rollout; the leader sends its own. They travel before the
    answers, because they decide which answers need a score, and where. Collective over the lane; equal on every rank of
    it.
    """
    received = None
    if place.is_leader:
        mine = np.array([_judged_row(trajectory) for trajectory in judged], JUDGED_ROW)
        received = join(place.gather_lane(mine.tobytes()))
    messages = split(place.share_in_cell(received))
    rank_map, lane = place.rank_map, place.lane
    shape = (num_prompts, len(rank_map.agents), rollouts_per_prompt)
    rewards_PNG, successes_PNG = torch.full(shape, torch.nan, dtype=torch.float64), torch.zeros(shape, dtype=torch.bool)
    shared = SharedRewards(rewards_PNG, successes_PNG, *torch.zeros((2, *shape), dtype=torch.int64))
    columns = tuple(zip(shared, ("reward", "is_success", "num_tokens", "text_hash"), strict=True))
    for message, rank in zip(messages, rank_map.leaders(lane), strict=True):
        sender = rank_map.coordinate(rank)
        prompts, agent = rank_map.share_of_lane(sender), sender.agent
        rows, expected = np.frombuffer(message, JUDGED_ROW), rewards_PNG[prompts, agent].numel()
        assert len(rows) == expected, f"{sender} sent {len(rows)} rewards instead of {expected}"
        for values_PNG, column in columns:
            group_PG = values_PNG[prompts, agent]
            group_PG.copy_(torch.from_numpy(rows[column].copy()).reshape(group_PG.shape))
    return shared


def _judged_row(trajectory: Trajectory) -> tuple[float, int, int, bool]:
    """Fields of JUDGED_ROW."""
    hashed, num_tokens = text_hash(trajectory.rollout.text), len(trajectory.rollout.token_ids)
    return trajectory.reward, hashed, num_tokens, trajectory.verdict is Verdict.CORRECT


def text_hash(text: str) -> int:
    """Number that is equal for equal texts, of 64 bits with a sign."""
    return int.from_bytes(
        hashlib.blake2b(text.encode("utf-8", "replace"), digest_size=8).digest(), "little", signed=True
    )


def judged_rollouts(place: Place, rollouts: Sequence[Rollout], judgements: Sequence[Judgement]) -> list[Trajectory]:
    """Judged rollouts of this cell, without a score, on its leader, which sends them; an empty list elsewhere."""
    if not place.is_leader:
        return []
    pairs = zip(rollouts, judgements, strict=True)
    return [Trajectory(place.agent, one, judgement.verdict, judgement.reward, math.nan, 0) for one, judgement in pairs]


def scored_trajectories(
    judged: Sequence[Trajectory], scores: Sequence[Score | None], *, by_token: bool = False
) -> list[Trajectory]:
    """The leader's trajectories with the cell's scores, where there is one; an empty list elsewhere.

    `by_token`: with the log-probs of tokens, which then travel.
    """
    return [
        trajectory
        if score is None
        else replace(
            trajectory,
            mean_logprob=score.mean_logprob,
            num_scored=len(score.token_logprobs),
            engine_weight=score.engine_weight,
            token_logprobs=score.token_logprobs if by_token else None,
        )
        for trajectory, score in zip(judged, scores, strict=bool(judged))
    ]


def deal_rollouts(
    rollouts: Sequence[Rollout],
    judged: Sequence[Trajectory],
    prompts: Sequence[Prompt],
    cell_PG: np.ndarray,
    place: Place,
) -> tuple[list[Rollout], list[Trajectory]]:
    """Answers that this cell scores and trains, in place of those that it wrote; by prompt, then by rollout.

    `cell_PG` is the cell in the lane of every answer of the agent to the lane's `prompts` (samples/packing.py). An
    answer whose cell did not write it is sent there, with engine log-probs and routing. `judged` is the leader's, as
    the second result. Collective over the lane, unless every agent has one cell in it.
    """
    shapes = place.rank_map.agents
    if all(shape.cells_per_lane == 1 for shape in shapes):
        return list(rollouts), list(judged)
    num_cells, my_cell = shapes[place.agent].cells_per_lane, place.coordinate.cell_in_lane
    row_of = {prompt.index: p for p, prompt in enumerate(prompts)}

    def cell_of(rollout: Rollout) -> int:
        return int(cell_PG[row_of[rollout.prompt_index], rollout.rollout_index])

    received = None
    if place.is_leader:
        leaving = [[t for t in judged if cell_of(t.rollout) == cell != my_cell] for cell in range(num_cells)]
        messages = place.gather_lane(join([encode(part, with_engine_data=True) for part in leaving]))
        agents = [place.rank_map.coordinate(rank).agent for rank in place.rank_map.leaders(place.lane)]
        mine = [split(message)[my_cell] for message, agent in zip(messages, agents) if agent == place.agent]
        received = join(mine)
    sender = f"a cell of {place.coordinate.agent_name} in lane {place.lane}"
    arrived = [t for message in split(place.share_in_cell(received)) for t in decode(message, sender)]

    def order(rollout: Rollout) -> tuple[int, int]:
        return row_of[rollout.prompt_index], rollout.rollout_index

    kept = [rollout for rollout in rollouts if cell_of(rollout) == my_cell]
    dealt = sorted([*kept, *(t.rollout for t in arrived)], key=order)
    stayed = [t for t in judged if cell_of(t.rollout) == my_cell]
    return dealt, sorted([*stayed, *arrived], key=lambda t: order(t.rollout)) if place.is_leader else []


def exchange(
    trajectories: Sequence[Trajectory], prompts: Sequence[Prompt], place: Place, rollouts_per_prompt: int
) -> Pool:
    """All answers of all agents to the prompts of this lane, identical on every rank of the lane.

    `trajectories` are this cell's, and the leader sends them; `prompts` are all prompts of the lane, in order: every
    answer comes from one cell of its agent, which has scored it. Collective over the lane. Raises ValueError on a
    damaged message, AssertionError if an answer is missing, doubled or from the wrong agent; both name the sender.
    """
    received = None
    if place.is_leader:
        received = join(place.gather_lane(encode(trajectories)))
    messages = split(place.share_in_cell(received))
    senders = place.rank_map.leaders(place.lane)
    by_sender = [
        [_with_token_logprobs(t) for t in decode(message, sender=str(place.rank_map.coordinate(rank)))]
        for message, rank in zip(messages, senders)
    ]
    return assemble(by_sender, prompts, place.rank_map, place.lane, rollouts_per_prompt)


def share_completions(
    mine: Sequence[Completion], place: Place, num_requests: int, *, first_has_all: bool = False
) -> list[Completion]:
    """Answers of all engines of a cell, in the order of the requests: Megatron trains on all of them.

    `mine` are those of this rank's engine, empty on a rank without one.
    Engine e of E got every E-th of `num_requests` requests, starting at e. Log-probs come with all answers or with
    none, and routing likewise. `first_has_all`: only an engine's first rank has its answers. Collective over the cell.
    """
    shape = place.rank_map.agents[place.agent]
    engines = shape.engines_per_cell
    if engines == 1 and not shape.rollout and not (first_has_all and shape.engine_tp > 1):
        return list(mine)
    # all ranks of an engine hold equal answers, so only its first one sends
    rows = np.array([(completion.stop,) for completion in mine], COMPLETION_ROW)
    message = wire.encode(wire.completion_table(rows, mine)) if place.coordinate.is_engine_leader else b""
    shared: list[Completion | None] = [None] * num_requests
    messages = [message for message in place.gather_cell(message) if message]
    for engine, message in enumerate(messages):
        table = wire.decode(message, COMPLETION_ROW, sender=f"engine {engine} of {place.coordinate}")
        shared[engine::engines] = wire.completions_of(table)
    return shared


def encode(trajectories: Sequence[Trajectory], *, with_engine_data: bool = False) -> bytes:
    """Encodes trajectories as a message of wire.py with rows of ROW.

    `with_engine_data`: with log-probs and routing of the engine, for another cell of the same agent. Otherwise the
    trajectories' `token_logprobs` travel in place of the engine's, if any has them: the first `num_scored` numbers.
    """
    rows = np.array([_row(trajectory) for trajectory in trajectories], ROW)
    rollouts = [trajectory.rollout for trajectory in trajectories]
    table = wire.completion_table(rows, rollouts)._replace(texts=[_text_of(trajectory) for trajectory in trajectories])
    if not with_engine_data:
        has_tokens = any(trajectory.token_logprobs is not None for trajectory in trajectories)
        logprobs = [_padded_logprobs(trajectory) for trajectory in trajectories] if has_tokens else None
        table = table._replace(logprobs=logprobs, routing=None)
    return wire.encode(table)


def _padded_logprobs(trajectory: Trajectory) -> np.ndarray:
    """Token log-probs of a trajectory, float32 [number of its tokens], NaN behind the scored ones."""
    logprobs_T = np.full(len(trajectory.rollout.token_ids), np.nan, np.float32)
    if trajectory.token_logprobs is not None:
        logprobs_T[: trajectory.num_scored] = trajectory.token_logprobs
    return logprobs_T


def _with_token_logprobs(trajectory: Trajectory) -> Trajectory:
    """A trajectory of `decode` with the log-probs that came with it as its `token_logprobs`."""
    if (logprobs := trajectory.rollout.logprobs) is None:
        return trajectory
    rollout, scored = replace(trajectory.rollout, logprobs=None), logprobs[: trajectory.num_scored]
    return replace(trajectory, rollout=rollout, token_logprobs=scored)


def decode(message: bytes, sender: str) -> list[Trajectory]:
    """Decodes a message. Raises ValueError that names `sender` if it is anything but a whole message."""
    trajectories = []
    table = wire.decode(message, ROW, sender)
    optional = table.logprobs or repeat(None), table.routing or repeat(None)
    for row, *answer in zip(table.rows.tolist(), table.tokens, table.texts, *optional):  # a column at a time is slow
        try:
            trajectories.append(_from_row(row, *answer))
        except (ValueError, AssertionError) as error:
            raise ValueError(f"message of {sender}: trajectory {len(trajectories)} is damaged: {error}") from error
    return trajectories


def assemble(
    by_sender: Sequence[Sequence[Trajectory]],
    prompts: Sequence[Prompt],
    rank_map: RankMap,
    lane: int,
    rollouts_per_prompt: int,
) -> Pool:
    """Full cube of a lane from its leaders' messages, in the order of `RankMap.leaders`.

    AssertionError, naming answer and sender, unless every (prompt, agent, rollout) came exactly once, from a cell of
    its agent.
    """
    answers: dict[tuple[int, int, int], Trajectory] = {}
    agents, rollouts = range(len(rank_map.agents)), range(rollouts_per_prompt)
    missing = [Counter((prompt.index, n, g) for prompt in prompts for g in rollouts) for n in agents]
    for rank, trajectories in zip(rank_map.leaders(lane), by_sender, strict=True):
        sender = rank_map.coordinate(rank)
        keys = [(t.rollout.prompt_index, t.agent, t.rollout.rollout_index) for t in trajectories]
        surplus = Counter(keys) - missing[sender.agent]
        assert not surplus, f"{sender} sent twice, or for another agent, {_list_keys(surplus)}"
        missing[sender.agent] -= Counter(keys)
        answers.update(zip(keys, trajectories))
    for keys, shape in zip(missing, rank_map.agents):
        assert not keys, f"no cell of {shape.name} in lane {lane} sent {_list_keys(keys)}"
    cube = tuple(tuple(tuple(answers[prompt.index, n, g] for g in rollouts) for n in agents) for prompt in prompts)
    return Pool(tuple(prompts), cube)


def _text_of(trajectory: Trajectory) -> str:
    rollout = trajectory.rollout
    if rollout.conversation is not None:
        return wire.conversation_text(rollout.conversation)
    text, num_replaced = wire.LONE_SURROGATE.subn("\ufffd", rollout.text)
    if num_replaced:
        where = f"agent {trajectory.agent}, prompt {rollout.prompt_index}, rollout {rollout.rollout_index}"
        logger.warning("answer of %s: %d lone surrogates travel as U+FFFD", where, num_replaced)
    return text


def _row(trajectory: Trajectory) -> tuple[float, float, float, int, int, int, int, int, int, bool]:
    """Fields of ROW."""
    rollout = trajectory.rollout
    numbers = trajectory.reward, trajectory.mean_logprob, trajectory.engine_weight
    key = rollout.prompt_index, rollout.rollout_index, trajectory.agent
    return *numbers, *key, trajectory.num_scored, rollout.stop, trajectory.verdict, rollout.conversation is not None


def _from_row(row: tuple, token_ids: np.ndarray, text: str, *optional: np.ndarray | None) -> Trajectory:
    *numbers, prompt_index, rollout_index, agent, num_scored, stop, verdict, is_conversation = row
    reward, mean_logprob, engine_weight = numbers
    conversation = wire.conversation_of(text) if is_conversation else None
    text = text if conversation is None else conversation.answer.content
    rollout = Rollout(prompt_index, rollout_index, token_ids, text, Stop(stop), *optional, conversation)
    return Trajectory(agent, rollout, Verdict(verdict), reward, mean_logprob, num_scored, engine_weight)


def _list_keys(keys: Counter) -> str:
    first = ", ".join(f"(prompt {p}, agent {n}, rollout {g})" for p, n, g in list(keys)[:MAX_NAMED])
    return f"{keys.total()} answer(s): {first}{' ...' if len(keys) > MAX_NAMED else ''}"
