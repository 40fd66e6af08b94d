"""The exchange: every answer to a lane's prompts, on every rank of the lane.

The leaders of a lane gather each other's trajectories (one round for the sizes, one for the bytes), each shares them
inside its cell, and every rank assembles the same full cube. Trajectories travel in this layout, little-endian, without
pickle (nothing that arrives is executed):

    header   HEADER   magic, version, number of trajectories, of tokens in all, of UTF-8 bytes in all
    rows     ROW      per trajectory; reward and mean_logprob keep all their bits, an unjudged reward is NaN
    tokens   int32    the source's token ids, end to end; a learner with an identical tokenizer keeps them
    text     UTF-8    the answers, end to end

A lone surrogate has no UTF-8 form and no tokenizer accepts one: it travels as U+FFFD, and a warning counts them.
Not here: judging, scoring, and what a learner makes of the pool (samples/learner_view.py).
"""

import logging
import re
import struct
from collections import Counter
from collections.abc import Sequence

import numpy as np

from hacpo_mega.cluster.place import Place, gather_bytes
from hacpo_mega.cluster.rank_map import RankMap
from hacpo_mega.records import Pool, Prompt, Rollout, Stop, Trajectory, Verdict

MAGIC = b"HACPOTRJ"
VERSION = 1
HEADER = struct.Struct("<8sIQQQ")
ROW = np.dtype(
    [
        ("reward", "<f8"),
        ("mean_logprob", "<f8"),
        ("prompt_index", "<i8"),
        ("rollout_index", "<i4"),
        ("agent", "<i4"),
        ("num_scored", "<i4"),
        ("num_tokens", "<i4"),
        ("num_text_bytes", "<i4"),
        ("stop", "u1"),
        ("verdict", "u1"),
    ]
)
LONE_SURROGATE = re.compile("[\ud800-\udfff]")
MAX_NAMED = 5  # how many missing answers an error names before it only counts them

logger = logging.getLogger(__name__)


def exchange(
    trajectories: Sequence[Trajectory], prompts: Sequence[Prompt], place: Place, rollouts_per_prompt: int
) -> Pool:
    """All answers of all agents to the prompts of this lane, identical on every rank of the lane.

    `trajectories` are this cell's, of which the leader's are sent; `prompts` are all prompts of the lane, in order:
    cell c of an agent answers prompts[c::cells_per_lane]. A collective over the lane. Raises ValueError on a damaged
    message and AssertionError when an answer is missing, doubled or sent by the wrong cell; both name the sender.
    """
    received = None
    if place.is_leader:
        received = pack(gather_bytes(place.lane_group, encode(trajectories)))
    messages = unpack(place.share_in_cell(received))
    senders = place.rank_map.leaders(place.lane)
    by_sender = [
        decode(message, sender=str(place.rank_map.coordinate(rank))) for message, rank in zip(messages, senders)
    ]
    return assemble(by_sender, prompts, place.rank_map, place.lane, rollouts_per_prompt)


def encode(trajectories: Sequence[Trajectory]) -> bytes:
    """Trajectories as bytes, in the layout above."""
    texts = [_encode_text(trajectory) for trajectory in trajectories]
    rows = np.empty(len(trajectories), ROW)
    for row, trajectory, text in zip(rows, trajectories, texts):
        rollout = trajectory.rollout
        row["reward"], row["mean_logprob"] = trajectory.reward, trajectory.mean_logprob
        row["prompt_index"], row["rollout_index"] = rollout.prompt_index, rollout.rollout_index
        row["agent"], row["num_scored"] = trajectory.agent, trajectory.num_scored
        row["num_tokens"], row["num_text_bytes"] = len(rollout.token_ids), len(text)
        row["stop"], row["verdict"] = rollout.stop, trajectory.verdict
    tokens = [trajectory.rollout.token_ids.astype("<i4", copy=False).tobytes() for trajectory in trajectories]
    sums = int(rows["num_tokens"].sum()), int(rows["num_text_bytes"].sum())
    header = HEADER.pack(MAGIC, VERSION, len(trajectories), *sums)
    return b"".join((header, rows.tobytes(), *tokens, *texts))


def decode(message: bytes, sender: str) -> list[Trajectory]:
    """The trajectories in a message. Raises ValueError that names `sender` if it is anything but a whole message."""
    rows, tokens, text = _sections(message, sender)
    ends = np.cumsum(rows["num_tokens"], dtype=np.int64), np.cumsum(rows["num_text_bytes"], dtype=np.int64)
    trajectories = []
    for row, token_end, text_end in zip(rows, *ends):
        token_ids = tokens[token_end - row["num_tokens"] : token_end]
        try:
            answer = text[text_end - row["num_text_bytes"] : text_end].decode("utf-8")
            trajectories.append(_from_row(row, token_ids, answer))
        except (ValueError, AssertionError) as error:
            what = f"trajectory {len(trajectories)} of {len(rows)}"
            raise ValueError(f"message of {sender}: {what} is damaged: {error}") from error
    return trajectories


def assemble(
    by_sender: Sequence[Sequence[Trajectory]],
    prompts: Sequence[Prompt],
    rank_map: RankMap,
    lane: int,
    rollouts_per_prompt: int,
) -> Pool:
    """The full cube of a lane from what its leaders sent, in the order of `RankMap.leaders`.

    AssertionError, naming answer and sender, unless every (prompt, agent, rollout) came exactly once from its own cell.
    """
    answers: dict[tuple[int, int, int], Trajectory] = {}
    for rank, trajectories in zip(rank_map.leaders(lane), by_sender, strict=True):
        sender = rank_map.coordinate(rank)
        keys = [(t.rollout.prompt_index, t.agent, t.rollout.rollout_index) for t in trajectories]
        mine = prompts[sender.cell_in_lane :: rank_map.agents[sender.agent].cells_per_lane]
        owed = [(prompt.index, sender.agent, g) for prompt in mine for g in range(rollouts_per_prompt)]
        missing, surplus = Counter(owed) - Counter(keys), Counter(keys) - Counter(owed)
        assert not missing, f"{sender} did not send {_named(missing)}"
        assert not surplus, f"{sender} sent twice, or for another cell, {_named(surplus)}"
        answers.update(zip(keys, trajectories))
    agents, rollouts = range(len(rank_map.agents)), range(rollouts_per_prompt)
    cube = tuple(tuple(tuple(answers[prompt.index, n, g] for g in rollouts) for n in agents) for prompt in prompts)
    return Pool(tuple(prompts), cube)


def pack(messages: Sequence[bytes]) -> bytes:
    """Several messages as one: their number, their sizes (uint64), their bytes."""
    sizes = np.array([len(messages), *map(len, messages)], dtype="<u8")
    return b"".join((sizes.tobytes(), *messages))


def unpack(packed: bytes) -> list[bytes]:
    """What `pack` packed."""
    num_messages = int(np.frombuffer(packed, "<u8", count=1)[0])
    sizes = np.frombuffer(packed, "<u8", count=num_messages, offset=8).astype(np.int64)
    ends = 8 * (num_messages + 1) + np.cumsum(sizes)
    assert ends[-1] == len(packed), (sizes, len(packed))
    return [packed[end - size : end] for size, end in zip(sizes, ends)]


def _encode_text(trajectory: Trajectory) -> bytes:
    rollout = trajectory.rollout
    text, num_replaced = LONE_SURROGATE.subn("\ufffd", rollout.text)
    if num_replaced:
        where = f"agent {trajectory.agent}, prompt {rollout.prompt_index}, rollout {rollout.rollout_index}"
        logger.warning("answer of %s: %d lone surrogates travel as U+FFFD", where, num_replaced)
    return text.encode("utf-8")


def _sections(message: bytes, sender: str) -> tuple[np.ndarray, np.ndarray, bytes]:
    """Rows, tokens and text of a message, after their sizes have been held against its header and its length."""
    if len(message) < HEADER.size:
        raise ValueError(f"message of {sender}: {len(message)} bytes are less than the header's {HEADER.size}")
    magic, version, num_rows, num_tokens, num_text_bytes = HEADER.unpack_from(message)
    if magic != MAGIC:
        raise ValueError(f"message of {sender}: starts with {magic!r} instead of {MAGIC!r}")
    if version != VERSION:
        raise ValueError(f"message of {sender}: layout {version}, this is {VERSION}: run one version of hacpo_mega")
    token_start = HEADER.size + num_rows * ROW.itemsize
    text_start = token_start + 4 * num_tokens
    if len(message) != text_start + num_text_bytes:
        raise ValueError(
            f"message of {sender}: {len(message)} bytes, but {num_rows} trajectories with {num_tokens} tokens and "
            f"{num_text_bytes} bytes of text take {text_start + num_text_bytes}"
        )
    rows = np.frombuffer(message, ROW, count=num_rows, offset=HEADER.size)
    for column, total in (("num_tokens", num_tokens), ("num_text_bytes", num_text_bytes)):
        if (rows[column] < 0).any() or int(rows[column].sum(dtype=np.int64)) != total:
            raise ValueError(f"message of {sender}: {column} of its trajectories do not add up to the header's {total}")
    tokens = np.frombuffer(message, "<i4", count=num_tokens, offset=token_start).astype(np.int32)
    return rows, tokens, message[text_start:]


def _from_row(row: np.void, token_ids: np.ndarray, text: str) -> Trajectory:
    rollout = Rollout(int(row["prompt_index"]), int(row["rollout_index"]), token_ids, text, Stop(int(row["stop"])))
    return Trajectory(
        agent=int(row["agent"]),
        rollout=rollout,
        verdict=Verdict(int(row["verdict"])),
        reward=float(row["reward"]),
        mean_logprob=float(row["mean_logprob"]),
        num_scored=int(row["num_scored"]),
    )


def _named(keys: Counter) -> str:
    named = ", ".join(f"(prompt {p}, agent {n}, rollout {g})" for p, n, g in list(keys)[:MAX_NAMED])
    return f"{keys.total()} answer(s): {named}{' ...' if len(keys) > MAX_NAMED else ''}"
