"""Byte layout in which answers travel between ranks: little-endian, no pickle, nothing received is executed.

    header   magic, version, bytes of a row, whether log-probs travel (0 or 1), routing bytes (1 or 2 per expert number,
             0: none travels), its layers, its experts; then totals: rows, tokens, UTF-8 bytes, tokens with a routing
    rows     a numpy structured array: the numbers of each record, with all their bits
    counts   int32 per row: tokens, bytes of text, and tokens with a routing, if any
    tokens   int32, end to end
    logprobs float32, one per token, end to end; empty if none travel
    routing  uint8 or uint16, layers x experts of each of its tokens, end to end
    text     UTF-8, end to end: an answer's, or a conversation as JSON

Elsewhere: what is sent to whom, between agents and inside a cell (exchange.py).
"""

import json
import math
import re
import struct
from collections.abc import Sequence
from itertools import accumulate, repeat
from typing import Any, NamedTuple

import numpy as np

from hacpo_mega.records import Completion, Conversation, Rollout, Stop, Turn

MAGIC = b"HACPOMSG"
VERSION = 4
HEADER = struct.Struct("<8s6I4Q")
LONE_SURROGATE = re.compile("[\ud800-\udfff]")
ROUTING_TYPES = {1: np.dtype("u1"), 2: np.dtype("<u2")}


class OtherLayout(ValueError):
    """A message of another version's layout."""


class Table(NamedTuple):
    """Records as they travel: their numbers, token ids (int32) and texts, one of each per record.

    `logprobs` are float32, one per token of each record; `routing` is as in records.Completion, with equally many
    layers and experts. Either is None for all of them together.
    """

    rows: np.ndarray
    tokens: list[np.ndarray]
    texts: list[str]
    logprobs: list[np.ndarray] | None = None
    routing: list[np.ndarray] | None = None


def encode(table: Table) -> bytes:
    """Encodes a table as one message."""
    texts = [text.encode("utf-8") for text in table.texts]
    tokens = [ids.astype("<i4", copy=False).tobytes() for ids in table.tokens]
    logprobs = [values.astype("<f4", copy=False).tobytes() for values in table.logprobs or []]
    assert table.logprobs is None or list(map(len, table.logprobs)) == list(map(len, table.tokens))
    routing = table.routing or []
    dtype, shape = (routing[0].dtype, routing[0].shape[1:]) if routing else (None, (0, 0))
    assert {(one.dtype, one.shape[1:]) for one in routing} <= {(dtype, shape)}
    columns = (table.tokens, texts, routing) if routing else (table.tokens, texts)
    counts = np.array([list(map(len, column)) for column in columns], dtype="<i4")
    flags = table.logprobs is not None, 0 if dtype is None else dtype.itemsize, *shape
    totals = [*counts.sum(axis=1, dtype=np.int64).tolist(), 0][:3]  # of routing 0 where none travels
    header = HEADER.pack(MAGIC, VERSION, table.rows.dtype.itemsize, *flags, len(table.rows), *totals)
    experts = [] if dtype is None else [one.astype(ROUTING_TYPES[dtype.itemsize]).tobytes() for one in routing]
    return b"".join((header, table.rows.tobytes(), counts.tobytes(), *tokens, *logprobs, *experts, *texts))


def decode(message: bytes, row_type: np.dtype, sender: str) -> Table:
    """Decodes a message. ValueError, which names `sender`, for anything but a whole one (or OtherLayout)."""
    has_logprobs, routing_bytes, shape, num_rows, *totals = _header(message, row_type, sender)
    num_tokens, num_text_bytes, num_routed = totals
    num_counts = 3 if routing_bytes else 2
    sections = (
        (row_type, num_rows),
        ("<i4", num_counts * num_rows),
        ("<i4", num_tokens),
        ("<f4", num_tokens if has_logprobs else 0),
        (ROUTING_TYPES.get(routing_bytes, "u1"), num_routed * math.prod(shape) if routing_bytes else 0),
    )
    *starts, text_start = accumulate((np.dtype(dtype).itemsize * n for dtype, n in sections), initial=HEADER.size)
    if len(message) != text_start + num_text_bytes:
        raise ValueError(
            f"message of {sender}: {len(message)} bytes, but {num_rows} records with {num_tokens} tokens and "
            f"{num_text_bytes} bytes of text take {text_start + num_text_bytes}"
        )
    rows, counts, tokens, logprobs, routing = (
        np.frombuffer(message, dtype, n, start) for (dtype, n), start in zip(sections, starts, strict=True)
    )
    counts = counts.reshape(num_counts, num_rows)
    for name, column, total in zip(("tokens", "bytes of text", "routed tokens"), counts, totals):
        if (column < 0).any() or int(column.sum(dtype=np.int64)) != total:
            raise ValueError(f"message of {sender}: the {name} of its records do not add up to the header's {total}")
    texts = _split(message[text_start:], counts[1])
    for i, text in enumerate(texts):
        try:
            texts[i] = text.decode("utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"message of {sender}: the text of record {i} is damaged: {error}") from error
    return Table(
        rows,
        _split(tokens.astype(np.int32), counts[0]),
        texts,
        _split(logprobs.astype(np.float32), counts[0]) if has_logprobs else None,
        _split(routing.reshape(num_routed, *shape), counts[2]) if routing_bytes else None,
    )


def _header(message: bytes, row_type: np.dtype, sender: str) -> tuple:
    """(has_logprobs, routing_bytes, (layers, experts), rows, tokens, bytes of text, tokens with a routing)."""
    if len(message) < HEADER.size:
        raise ValueError(f"message of {sender}: {len(message)} bytes are less than the header's {HEADER.size}")
    magic, version, row_bytes, has_logprobs, routing_bytes, layers, experts, *totals = HEADER.unpack_from(message)
    if magic != MAGIC:
        raise ValueError(f"message of {sender}: starts with {magic!r} instead of {MAGIC!r}")
    if (version, row_bytes) != (VERSION, row_type.itemsize):
        raise OtherLayout(
            f"message of {sender}: layout {version} with rows of {row_bytes} bytes, this is {VERSION} with "
            f"{row_type.itemsize}: run one version of hacpo_mega"
        )
    if has_logprobs not in (0, 1):
        raise ValueError(f"message of {sender}: log-probs travel or not, 1 or 0, but the header says {has_logprobs}")
    if routing_bytes not in (0, *ROUTING_TYPES):
        raise ValueError(f"message of {sender}: routing has 1 or 2 bytes, but the header says {routing_bytes}")
    return has_logprobs, routing_bytes, (layers, experts), *totals


def _split(section: Any, counts: np.ndarray) -> list:
    """Each record's part of a section: `counts` items."""
    ends = np.cumsum(counts, dtype=np.int64)
    return [section[end - count : end] for end, count in zip(ends, counts)]


def completion_table(rows: np.ndarray, completions: Sequence[Completion | Rollout]) -> Table:
    """Table of answers: texts are their conversations; log-probs and routing travel if all answers have them.

    `rows` have a field "stop".
    """
    logprobs, routing = ([getattr(c, name) for c in completions] for name in ("logprobs", "routing"))
    optional = (None if any(values is None for values in column) else column for column in (logprobs, routing))
    texts = [conversation_text(completion.conversation) for completion in completions]
    return Table(rows, [completion.token_ids for completion in completions], texts, *optional)


def completions_of(table: Table) -> list[Completion]:
    """Inverse of `completion_table`."""
    optional = table.logprobs or repeat(None), table.routing or repeat(None)
    stops, conversations = map(Stop, table.rows["stop"].tolist()), map(conversation_of, table.texts)
    return [Completion(*columns) for columns in zip(table.tokens, stops, *optional, conversations)]


def conversation_text(conversation: Conversation | None) -> str:
    """A conversation as JSON text; "" for None."""
    if conversation is None:
        return ""
    turns = [[t.role, t.content, t.num_tokens, t.stop, t.name, *filter(None, [t.opened])] for t in conversation.turns]
    parts = [turns, conversation.opening, conversation.reward, dict(conversation.counts), conversation.task]
    return LONE_SURROGATE.sub("\ufffd", json.dumps(parts, ensure_ascii=False))


def conversation_of(text: str) -> Conversation | None:
    """Inverse of `conversation_text`. ValueError for any other text."""
    if not text:
        return None
    try:
        turns, opening, reward, counts, task = json.loads(text)
        read = [
            Turn(str(role), str(content), int(num_tokens), None if stop is None else Stop(stop), *map(str, names))
            for role, content, num_tokens, stop, *names in turns
        ]
        numbers = {str(name): int(number) for name, number in counts.items()}
        return Conversation(tuple(read), str(opening), None if reward is None else float(reward), numbers, str(task))
    except (ValueError, TypeError, AttributeError, ArithmeticError, AssertionError, RecursionError) as error:
        raise ValueError(f"no conversation: {text[:80]!r}: {error}") from error
