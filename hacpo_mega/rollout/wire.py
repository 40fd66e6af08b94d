"""The one byte layout in which answers travel between ranks: little-endian, no pickle, nothing that arrives is run.

    header   magic, version, bytes of a row, whether log-probs travel (0 or 1), then in all: rows, tokens, UTF-8 bytes
    rows     a numpy structured array: the numbers of each record, with all their bits
    counts   int32 per row: its tokens; then int32 per row: its bytes of text
    tokens   int32, end to end
    logprobs float32, one per token, end to end; where none travel, nothing
    text     UTF-8, end to end

Who sends what is elsewhere: trajectories between agents in exchange.py, fresh answers inside a cell in agent.py.
"""

import struct
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

MAGIC = b"HACPOMSG"
VERSION = 3
HEADER = struct.Struct("<8sIIIQQQ")


class Table(NamedTuple):
    """Records as they travel: their numbers, their token ids (int32) and their texts, one of each per record.

    `logprobs` are float32, one per token of each record, or None for all of them together.
    """

    rows: np.ndarray
    tokens: list[np.ndarray]
    texts: list[str]
    logprobs: list[np.ndarray] | None = None


def encode(table: Table) -> bytes:
    """A table as one message."""
    texts = [text.encode("utf-8") for text in table.texts]
    tokens = [ids.astype("<i4", copy=False).tobytes() for ids in table.tokens]
    logprobs = [values.astype("<f4", copy=False).tobytes() for values in table.logprobs or []]
    assert table.logprobs is None or list(map(len, table.logprobs)) == list(map(len, table.tokens))
    counts = np.array([list(map(len, table.tokens)), list(map(len, texts))], dtype="<i4")
    sums = counts.sum(axis=1, dtype=np.int64).tolist()
    header = HEADER.pack(MAGIC, VERSION, table.rows.dtype.itemsize, table.logprobs is not None, len(table.rows), *sums)
    return b"".join((header, table.rows.tobytes(), counts.tobytes(), *tokens, *logprobs, *texts))


def decode(message: bytes, row_type: np.dtype, sender: str) -> Table:
    """The table in a message. Raises ValueError that names `sender` if it is anything but a whole message."""
    rows, (token_counts, text_counts), tokens, logprobs, text = _sections(message, row_type, sender)
    token_ends, text_ends = np.cumsum(token_counts, dtype=np.int64), np.cumsum(text_counts, dtype=np.int64)
    texts = []
    for i, (end, count) in enumerate(zip(text_ends, text_counts)):
        try:
            texts.append(text[end - count : end].decode("utf-8"))
        except UnicodeDecodeError as error:
            raise ValueError(f"message of {sender}: the text of record {i} is damaged: {error}") from error
    spans = [slice(end - count, end) for end, count in zip(token_ends, token_counts)]
    by_record = None if logprobs is None else [logprobs[span] for span in spans]
    return Table(rows, [tokens[span] for span in spans], texts, by_record)


def _sections(
    message: bytes, row_type: np.dtype, sender: str
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray | None, bytes]:
    """Rows, counts [2, rows], tokens, log-probs and text, their sizes held against the header and the length."""
    if len(message) < HEADER.size:
        raise ValueError(f"message of {sender}: {len(message)} bytes are less than the header's {HEADER.size}")
    magic, version, row_bytes, has_logprobs, num_rows, num_tokens, num_text_bytes = HEADER.unpack_from(message)
    if magic != MAGIC:
        raise ValueError(f"message of {sender}: starts with {magic!r} instead of {MAGIC!r}")
    if (version, row_bytes) != (VERSION, row_type.itemsize):
        raise ValueError(
            f"message of {sender}: layout {version} with rows of {row_bytes} bytes, this is {VERSION} with "
            f"{row_type.itemsize}: run one version of hacpo_mega"
        )
    if has_logprobs not in (0, 1):
        raise ValueError(f"message of {sender}: log-probs travel or not, 1 or 0, but the header says {has_logprobs}")
    count_start = HEADER.size + num_rows * row_bytes
    token_start = count_start + 8 * num_rows
    logprob_start = token_start + 4 * num_tokens
    text_start = logprob_start + 4 * num_tokens * has_logprobs
    if len(message) != text_start + num_text_bytes:
        raise ValueError(
            f"message of {sender}: {len(message)} bytes, but {num_rows} records with {num_tokens} tokens and "
            f"{num_text_bytes} bytes of text take {text_start + num_text_bytes}"
        )
    counts = np.frombuffer(message, "<i4", count=2 * num_rows, offset=count_start).reshape(2, num_rows)
    for what, column, total in zip(("tokens", "bytes of text"), counts, (num_tokens, num_text_bytes)):
        if (column < 0).any() or int(column.sum(dtype=np.int64)) != total:
            raise ValueError(f"message of {sender}: the {what} of its records do not add up to the header's {total}")
    rows = np.frombuffer(message, row_type, count=num_rows, offset=HEADER.size)
    tokens = np.frombuffer(message, "<i4", count=num_tokens, offset=token_start).astype(np.int32)
    logprobs = None
    if has_logprobs:
        logprobs = np.frombuffer(message, "<f4", count=num_tokens, offset=logprob_start).astype(np.float32)
    return rows, counts, tokens, logprobs, message[text_start:]


def join(messages: Sequence[bytes]) -> bytes:
    """Several messages as one: their number, their sizes (uint64), their bytes."""
    sizes = np.array([len(messages), *map(len, messages)], dtype="<u8")
    return b"".join((sizes.tobytes(), *messages))


def split(joined: bytes) -> list[bytes]:
    """What `join` joined."""
    num_messages = int(np.frombuffer(joined, "<u8", count=1)[0])
    sizes = np.frombuffer(joined, "<u8", count=num_messages, offset=8).astype(np.int64)
    ends = 8 * (num_messages + 1) + np.cumsum(sizes)
    assert ends[-1] == len(joined), (sizes, len(joined))
    return [joined[end - size : end] for size, end in zip(sizes, ends)]
