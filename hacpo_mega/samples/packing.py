"""Samples -> optimizer updates -> packed micro-batches. Pure functions, no communication.

Packing is THD: sequences lie end to end, `cu_seqlens` says where each starts, and there is no rectangle to pad.
A cost of each sequence (its FLOPs: attention grows with the square of a length) can even the micro-batches or order
them: the stages of a pipeline wait for what stands at both ends of an update.
It decides which samples are computed together, never what they weigh: the loss is divided by counts handed to the
loss itself, so any packing gives the same gradient. What packing does change is rounding (a matrix product of another
height), hence one rule: in an update own samples are packed by themselves, so that scoring them before the update and
learning from them repeat the same micro-batches, and the first update's own ratio is exactly 1.
"""

from collections.abc import Callable, Iterable, Sequence

import numpy as np
import torch

from hacpo_mega.records import MicroBatch, Sample, TokenSequence

PADDING_TOKEN = 0

# tokens that a model reads of a sequence -> what it costs, in any unit
Cost = Callable[[int], float]


def plan_updates(
    samples: Iterable[Sample], prompt_indices: Sequence[int], prompts_per_update: int
) -> list[tuple[Sample, ...]]:
    """Split a step's samples into its optimizer updates: consecutive blocks of prompts, own answers first in each.

    `prompt_indices` are the prompts this cell trains in this step, in order; a prompt all of whose samples were dropped
    still counts there, so that every rank plans the same number of updates. All samples of a prompt, own and cross,
    land in the same update, so each update holds own and cross answers as 1 : N-1 (Algorithm 1). Inside an update the
    order is (own before cross, prompt, source, rollout), whatever order `samples` came in. It may come out empty.

    Raises ValueError for an uneven split and for a sample of a prompt that is not listed.
    """
    if not prompt_indices or len(prompt_indices) % prompts_per_update:
        raise ValueError(
            f"{len(prompt_indices)} prompts do not split into updates of {prompts_per_update}: "
            "give a step a multiple of prompts_per_update prompts on every cell"
        )
    place_of = {prompt: place for place, prompt in enumerate(prompt_indices)}
    updates: list[list[Sample]] = [[] for _ in range(len(prompt_indices) // prompts_per_update)]
    for sample in samples:
        if sample.prompt_index not in place_of:
            raise ValueError(f"a sample answers prompt {sample.prompt_index}, which is not among this cell's prompts")
        updates[place_of[sample.prompt_index] // prompts_per_update].append(sample)

    def order(sample: Sample) -> tuple[bool, int, int, int]:
        return (not sample.is_self, place_of[sample.prompt_index], sample.source, sample.rollout_index)

    return [tuple(sorted(update, key=order)) for update in updates]


def input_length(sequence: TokenSequence) -> int:
    """Tokens the model must read to predict every trained token: the last trained one is predicted, never read."""
    return len(sequence.prompt_ids) + sequence.num_trained - 1


def pack_update(
    samples: Sequence[Sample],
    max_tokens: int,
    *,
    multiple: int = 1,
    cost: Cost | None = None,
    order: Cost | None = None,
) -> list[MicroBatch]:
    """The micro-batches of an update: `pack` of its own answers, as they were scored, then of the others'.

    With `order`, a cost too, the cheap ones stand at both ends and the dearest in the middle.
    """
    own = [sample for sample in samples if sample.is_self]
    cross = [sample for sample in samples if not sample.is_self]
    batches = [batch for part in (own, cross) for batch in pack(part, max_tokens, multiple=multiple, cost=cost)]
    if order is None:
        return batches
    rising = sorted(batches, key=lambda batch: sum(order(input_length(sequence)) for sequence in batch.sequences))
    return [*rising[::2], *reversed(rising[1::2])]


def pack(
    sequences: Sequence[TokenSequence], max_tokens: int, *, multiple: int = 1, cost: Cost | None = None
) -> list[MicroBatch]:
    """Pack sequences into micro-batches of at most `max_tokens` tokens.

    First-fit decreasing over lengths (ties in the given order): deterministic, within 11/9 of the fewest micro-batches,
    and neighbours have similar lengths, which evens out attention. With `cost` as many, or more where their tokens do
    not fit otherwise, and each sequence, longest first, in the one that has cost least so far. `multiple` (tp x
    cp, the ranks that share the tokens) rounds T up and must divide `max_tokens`. Sequences without trained
    tokens are left out.

    Raises ValueError when a sequence alone is longer than `max_tokens`.
    """
    if max_tokens % multiple:
        raise ValueError(
            f"max_tokens_per_microbatch ({max_tokens}) must be a multiple of tp x cp ({multiple}). "
            f"Nearest: {max_tokens // multiple * multiple}."
        )
    trained = [sequence for sequence in sequences if sequence.num_trained > 0]
    bins = _first_fit_decreasing(trained, max_tokens)
    if cost is not None:
        bins = _evened(trained, max_tokens, len(bins), cost)
    return [microbatch(members, multiple) for members in bins]


def _first_fit_decreasing(sequences: Sequence[TokenSequence], max_tokens: int) -> list[list[TokenSequence]]:
    lengths = np.array([input_length(sequence) for sequence in sequences], dtype=np.int64)
    bins: list[list[TokenSequence]] = []
    room = np.zeros(0, dtype=np.int64)
    for place in np.argsort(-lengths, kind="stable"):
        if lengths[place] > max_tokens:
            raise ValueError(
                f"{len(sequences[place].prompt_ids)} prompt tokens with their answer are {lengths[place]}, more than "
                f"max_tokens_per_microbatch ({max_tokens}). Raise it to max_prompt_tokens + max_answer_tokens or more."
            )
        fits = np.flatnonzero(room >= lengths[place])
        if len(fits) == 0:
            bins.append([])
            room = np.append(room, max_tokens)
            fits = [len(bins) - 1]
        bins[fits[0]].append(sequences[place])
        room[fits[0]] -= lengths[place]
    return bins


def _evened(
    sequences: Sequence[TokenSequence], max_tokens: int, num_bins: int, cost: Cost
) -> list[list[TokenSequence]]:
    """Longest first into the bin of least cost that has room (Graham 1969, LPT): at least `num_bins` of them."""
    lengths = np.array([input_length(sequence) for sequence in sequences], dtype=np.int64)
    bins: list[list[TokenSequence]] = [[] for _ in range(num_bins)]
    room, spent = np.full(num_bins, max_tokens), np.zeros(num_bins)
    for place in np.argsort(-lengths, kind="stable"):
        fits = np.flatnonzero(room >= lengths[place])
        if len(fits) == 0:
            return _evened(sequences, max_tokens, num_bins + 1, cost)
        chosen = fits[np.argmin(spent[fits])]
        bins[chosen].append(sequences[place])
        room[chosen] -= lengths[place]
        spent[chosen] += cost(int(lengths[place]))
    return bins


def microbatch(sequences: Sequence[TokenSequence], multiple: int = 1) -> MicroBatch:
    """Lay `sequences` end to end (see records.MicroBatch). Every one must have a trained token.

    Row i of a sequence reads position len(prompt) - 1 + i and predicts answer token i. A tail of padding, a segment of
    its own, rounds T up to `multiple`; nothing of it is trained and no sequence attends to it.
    """
    assert sequences, "an empty micro-batch"
    assert all(sequence.num_trained > 0 for sequence in sequences), "a sequence with nothing to train"
    lengths = np.array([input_length(sequence) for sequence in sequences])
    trained = np.array([sequence.num_trained for sequence in sequences])
    starts = np.concatenate([[0], np.cumsum(lengths)])
    row_starts = np.concatenate([[0], np.cumsum(trained)])
    padding = -starts[-1] % multiple

    tokens = [part for s in sequences for part in (s.prompt_ids, s.answer_ids[: s.num_trained - 1])]
    tokens_T = np.concatenate([*tokens, np.full(padding, PADDING_TOKEN)]).astype(np.int64)
    positions_T = np.concatenate([_counting(lengths), np.arange(padding)])
    # a sequence's rows are its last num_trained positions: the first reads the prompt's end
    rows_R = np.repeat(starts[1:] - trained, trained) + _counting(trained)
    targets_R = np.concatenate([s.answer_ids[: s.num_trained] for s in sequences]).astype(np.int64)
    ends = starts if padding == 0 else np.append(starts, starts[-1] + padding)
    return MicroBatch(
        tokens_T=torch.from_numpy(tokens_T),
        positions_T=torch.from_numpy(positions_T),
        cu_seqlens=torch.from_numpy(ends.astype(np.int32)),
        rows_R=torch.from_numpy(rows_R),
        targets_R=torch.from_numpy(targets_R),
        row_cu_seqlens_B=torch.from_numpy(row_starts.astype(np.int32)),
        sequences=tuple(sequences),
    )


def empty_microbatch(multiple: int) -> MicroBatch:
    """`multiple` tokens of padding and nothing trained: for a schedule that wants more micro-batches than there are."""
    none = torch.empty(0, dtype=torch.int64)
    return MicroBatch(
        tokens_T=torch.full((multiple,), PADDING_TOKEN),
        positions_T=torch.arange(multiple),
        cu_seqlens=torch.tensor([0, multiple], dtype=torch.int32),
        rows_R=none,
        targets_R=none,
        row_cu_seqlens_B=torch.zeros(1, dtype=torch.int32),
        sequences=(),
    )


def _counting(lengths: np.ndarray) -> np.ndarray:
    """0 .. n-1 for every n of `lengths`, end to end."""
    return np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)
