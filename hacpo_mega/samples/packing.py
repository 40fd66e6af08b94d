"""Samples -> cells -> optimizer updates -> packed micro-batches. Pure functions, no communication.

Packing is THD: sequences lie end to end, `cu_seqlens` has their starts, and there is no padding to a rectangle. Answers
to one prompt can share it: it is read once, and each of them attends to it before its own tokens.
Packing decides which samples are computed together, never their weight: the loss is divided by counts passed to it, so
any packing gives the same gradient. But packing changes rounding (a matrix product of another height). Hence one rule:
in a step's first update own samples are packed by themselves, so that scoring them before the update and learning from
them repeat the same micro-batches, and the own ratio is exactly 1. Later updates have other weights than those that
scored: there, in float32, own answers share micro-batches, and prompts, with others'.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from hacpo_mega.records import MicroBatch, Sample, TokenSequence
from hacpo_mega.samples.routing import packed_routing

PADDING_TOKEN = 0
TOLERANCE = 200  # cells are level when the fullest exceeds the mean by at most a 200th


def plan_updates(
    samples: Iterable[Sample], prompt_indices: Sequence[int], prompts_per_update: int
) -> list[tuple[Sample, ...]]:
    """Splits a step's samples into its optimizer updates: consecutive blocks of prompts, own answers first in each.

    `prompt_indices` are the lane's prompts of this step, in order; a prompt whose samples were all dropped, or went to
    other cells, still counts, so that every rank plans the same number of updates. All samples of a prompt, own and
    cross, land in the same update, so each update holds own and cross answers as 1 : N-1 (Algorithm 1). Inside an
    update the order is (own before cross, prompt, source, rollout), whatever the order of `samples`. An update may be
    empty.
    """
    assert prompt_indices and len(prompt_indices) % prompts_per_update == 0, (len(prompt_indices), prompts_per_update)
    place_of = {prompt: place for place, prompt in enumerate(prompt_indices)}
    updates: list[list[Sample]] = [[] for _ in range(len(prompt_indices) // prompts_per_update)]
    for sample in samples:
        updates[place_of[sample.prompt_index] // prompts_per_update].append(sample)

    def order(sample: Sample) -> tuple[bool, int, int, int]:
        return (not sample.is_self, place_of[sample.prompt_index], sample.source, sample.rollout_index)

    return [tuple(sorted(update, key=order)) for update in updates]


@dataclass(frozen=True)
class TokenWork:
    """Work of reading tokens, in pairs of tokens that attend: integers, so that all ranks get equal sums.

    pairs_per_token   pairs whose attention costs as much as a token's matrices
    shares_prompts    whether a cell's answers to one prompt read it once
    """

    pairs_per_token: int
    shares_prompts: bool

    def of_prompts(self, prompts: np.ndarray) -> np.ndarray:
        """Work of reading prompts of so many tokens."""
        return prompts * self.pairs_per_token + prompts * prompts // 2

    def of_answers(self, prompts: np.ndarray, answers: np.ndarray) -> np.ndarray:
        """Work of answers of so many tokens, without that of their prompts if these are shared."""
        alone = answers * self.pairs_per_token + answers * prompts + answers * answers // 2
        return alone if self.shares_prompts else alone + self.of_prompts(prompts)


def deal_answers(
    tokens_PNG: np.ndarray,
    trains_PNG: np.ndarray,
    prompt_tokens_P: np.ndarray,
    *,
    learner: int,
    cells: int,
    prompts_per_update: int,
    work: TokenWork,
) -> np.ndarray:
    """Cell in the lane that scores and trains each answer, int64 [P, N, G], so that cells finish updates together.

    Prompt p belongs to cell p modulo `cells`, and its answers stay there unless another cell has less to do: in each
    update answers move from the fullest cell to the emptiest, own ones first, since they are also scored, then others',
    which all cells have. An answer's tokens are counted as its source's; a common factor would change nothing.
    `trains_PNG` are the answers that `learner` trains on; others stay. A pure function of integers, equal on all ranks.
    """
    cell_PNG = np.broadcast_to((np.arange(len(tokens_PNG)) % cells)[:, None, None], tokens_PNG.shape).copy()
    prompt_P = work.of_prompts(prompt_tokens_P) if work.shares_prompts else np.zeros_like(prompt_tokens_P)
    work_PNG = work.of_answers(prompt_tokens_P[:, None, None], tokens_PNG)
    is_own_PNG = np.zeros_like(trains_PNG)
    is_own_PNG[:, learner] = True
    for start in range(0, len(tokens_PNG) if cells > 1 else 0, prompts_per_update):
        update = slice(start, start + prompts_per_update)
        load_C = np.zeros(cells, dtype=np.int64)
        for part_PNG in (is_own_PNG, ~is_own_PNG):
            places = np.nonzero((trains_PNG & part_PNG)[update])
            dealt = cell_PNG[update][places]
            _level(dealt, places[0], work_PNG[update][places], prompt_P[update], load_C)
            cell_PNG[update][places] = dealt
    return cell_PNG


def _level(
    cell_A: np.ndarray, prompt_A: np.ndarray, work_A: np.ndarray, prompt_P: np.ndarray, load_C: np.ndarray
) -> None:
    """Adds A answers to the loads of C cells, and moves them from the fullest cell to the emptiest while that helps.

    A move is of all answers to a prompt or of one, whichever levels the two cells best; it counts that a prompt may be
    read in one cell more or less. `cell_A` and `load_C` are changed in place.
    """
    work_PC = np.zeros((len(prompt_P), len(load_C)), dtype=np.int64)
    num_PC = np.zeros_like(work_PC)
    np.add.at(work_PC, (prompt_A, cell_A), work_A)
    np.add.at(num_PC, (prompt_A, cell_A), 1)
    load_C += (work_PC + prompt_P[:, None] * (num_PC > 0)).sum(axis=0)
    for _ in range(len(cell_A)):
        full, empty = int(load_C.argmax()), int(load_C.argmin())
        if load_C[full] * len(load_C) <= load_C.sum() // TOLERANCE * (TOLERANCE + 1):
            return
        mine = np.flatnonzero(cell_A == full)
        prompts = np.flatnonzero(num_PC[:, full])
        # Candidates: every prompt of the fullest cell, then every answer there.
        moved = np.concatenate([work_PC[prompts, full], work_A[mine]])
        prompt_of = np.concatenate([prompts, prompt_A[mine]])
        is_last = np.concatenate([np.full(len(prompts), True), num_PC[prompt_A[mine], full] == 1])
        is_first, prompt_work = num_PC[prompt_of, empty] == 0, prompt_P[prompt_of]
        leaves, comes = moved + prompt_work * is_last, moved + prompt_work * is_first
        highest = np.maximum(load_C[full] - leaves, load_C[empty] + comes)
        best = int(highest.argmin()) if len(highest) else 0
        if not len(highest) or highest[best] >= load_C[full]:
            return
        chosen = mine[prompt_A[mine] == prompt_of[best]] if best < len(prompts) else mine[[best - len(prompts)]]
        cell_A[chosen] = empty
        for table_PC, amount in ((work_PC, moved[best]), (num_PC, len(chosen))):
            table_PC[prompt_of[best], full] -= amount
            table_PC[prompt_of[best], empty] += amount
        load_C[full] -= leaves[best]
        load_C[empty] += comes[best]


def input_length(sequence: TokenSequence) -> int:
    """Number of tokens to read to predict every trained token: the last trained one is predicted, never read."""
    return len(sequence.prompt_ids) + sequence.num_needed - 1


def pack_update(
    samples: Sequence[Sample], max_tokens: int, *, multiple: int = 1, shares_prompts: bool = False
) -> list[MicroBatch]:
    """Micro-batches of a first update: `pack` of its own answers, as they were scored, then of the others'."""
    parts = ([sample for sample in samples if sample.is_self is own] for own in (True, False))
    return [b for part in parts for b in pack(part, max_tokens, multiple=multiple, shares_prompts=shares_prompts)]


def pack(
    sequences: Sequence[TokenSequence], max_tokens: int, *, multiple: int = 1, shares_prompts: bool = False
) -> list[MicroBatch]:
    """Packs sequences into micro-batches of at most `max_tokens` tokens.

    First-fit decreasing over lengths (ties in the given order): deterministic, within 11/9 of the fewest micro-batches,
    and neighbours have similar lengths, which evens out attention. With `shares_prompts` the sequences of one prompt
    stay together, as many as fit, and read it once. `multiple` (tp x cp, the ranks that share the tokens) rounds T up
    and must divide `max_tokens`. Sequences without trained tokens are left out.

    Raises ValueError when a sequence alone is longer than `max_tokens`.
    """
    assert max_tokens % multiple == 0, (max_tokens, multiple)
    groups = [[sequence] for sequence in sequences if sequence.num_trained > 0]
    if shares_prompts:
        groups = [part for group in _by_prompt(groups) for part in _split_to_fit(group, max_tokens)]
    return [microbatch(members, multiple) for members in _first_fit_decreasing(groups, max_tokens)]


def _by_prompt(groups: Iterable[Sequence[TokenSequence]]) -> list[list[TokenSequence]]:
    """Groups by equal prompt, in order of first appearance."""
    found: dict[bytes, list[TokenSequence]] = {}
    for group in groups:
        found.setdefault(group[0].prompt_ids.tobytes(), []).extend(group)
    return list(found.values())


def _split_to_fit(group: Sequence[TokenSequence], max_tokens: int) -> Iterator[list[TokenSequence]]:
    """Splits a group into neighbours that fit together; a sequence that does not fit by itself comes alone."""
    part: list[TokenSequence] = []
    for sequence in group:
        if part and _length([*part, sequence]) > max_tokens:
            yield part
            part = []
        part.append(sequence)
    yield part


def _length(group: Sequence[TokenSequence]) -> int:
    """Tokens to read for sequences of one prompt."""
    return len(group[0].prompt_ids) + sum(sequence.num_needed - 1 for sequence in group)


def _first_fit_decreasing(groups: Sequence[list[TokenSequence]], max_tokens: int) -> list[list[list[TokenSequence]]]:
    lengths = np.array([_length(group) for group in groups], dtype=np.int64)
    bins: list[list[list[TokenSequence]]] = []
    room = np.zeros(0, dtype=np.int64)
    for place in np.argsort(-lengths, kind="stable"):
        if lengths[place] > max_tokens:
            raise ValueError(
                f"{len(groups[place][0].prompt_ids)} prompt tokens with their answer are {lengths[place]}, more than "
                f"max_tokens_per_microbatch ({max_tokens}). Raise it to max_prompt_tokens + max_answer_tokens or more."
            )
        fits = np.flatnonzero(room >= lengths[place])
        if len(fits) == 0:
            bins.append([])
            room = np.append(room, max_tokens)
            fits = [len(bins) - 1]
        bins[fits[0]].append(groups[place])
        room[fits[0]] -= lengths[place]
    return bins


def microbatch(groups: Sequence[Sequence[TokenSequence]], multiple: int = 1) -> MicroBatch:
    """Lays groups of sequences, each of one prompt, end to end (see records.MicroBatch); every one has a trained token.

    Segments: first the prompts of groups of several, the longest first; then the sequences of groups of one; then the
    answers of the others, the longest first: neighbours attend together (attention.py). A sequence of several segments
    is laid likewise; its further ones attend to nothing before them. The row of answer token i reads
    position len(prompt) - 1 + i and predicts it. A tail of padding, a segment of its own, rounds T up to `multiple`;
    nothing of it is trained and no sequence attends to it.
    """
    assert groups and all(groups), "an empty micro-batch"
    shared = sorted((group for group in groups if len(group) > 1), key=lambda group: -len(group[0].prompt_ids))
    prompts = [group[0].prompt_ids for group in shared]
    alone = [group[0] for group in groups if len(group) == 1]
    places = [(place, sequence) for place, group in enumerate(shared) for sequence in group]
    places.sort(key=lambda placed: (-placed[1].num_needed, placed[0]))
    sequences = [*alone, *(sequence for _, sequence in places)]
    assert all(sequence.num_trained > 0 for sequence in sequences), "a sequence with nothing to train"

    trained = np.array([sequence.num_trained for sequence in sequences])
    prompt_lengths = np.array([len(prompt) for prompt in prompts], dtype=np.int64)
    prompt_ends, prompt_of = np.cumsum(prompt_lengths), np.array([place for place, _ in places], dtype=np.int64)
    own_lengths = [input_length(sequence) for sequence in alone] + [sequence.num_needed - 1 for _, sequence in places]
    padding = -(prompt_lengths.sum() + sum(own_lengths)) % multiple
    lengths = np.concatenate([prompt_lengths, own_lengths, [padding]]).astype(np.int64)
    prefixes = np.zeros((len(lengths), 2), dtype=np.int64)
    first_answer = len(prompts) + len(alone)
    prefixes[first_answer:-1, 1] = prompt_lengths[prompt_of]
    prefixes[first_answer:-1, 0] = prompt_ends[prompt_of] - prompt_lengths[prompt_of]
    ends = np.cumsum(lengths)

    row_starts = np.concatenate([[0], np.cumsum(trained)])
    # A sequence's last num_needed positions predict its answer: the first is the prompt's end, wherever that is.
    needed = np.array([sequence.num_needed for sequence in sequences])
    places_R = np.concatenate([_trained_places(sequence) for sequence in sequences])
    rows_R = np.repeat(ends[len(prompts) : -1] - needed, trained) + places_R
    ends_R = np.repeat(np.concatenate([np.zeros(len(alone), np.int64), prompt_ends[prompt_of]]), trained)
    rows_R = np.where((places_R == 0) & (ends_R > 0), ends_R - 1, rows_R)
    answers = [sequence.answer_ids[: sequence.num_needed - 1] for sequence in sequences]
    texts = [part for s, answer in zip(alone, answers) for part in (s.prompt_ids, answer)] + answers[len(alone) :]
    tokens_T = np.concatenate([*prompts, *texts, np.full(padding, PADDING_TOKEN)]).astype(np.int64)
    firsts = [len(s.prompt_ids) for s in alone] + [0] * len(places)
    lengths, prefixes = _cut_segments(lengths, prefixes, len(prompts), zip(sequences, firsts))
    is_segment = lengths > 0
    return MicroBatch(
        tokens_T=torch.from_numpy(tokens_T),
        positions_T=torch.from_numpy(_ranges(lengths) + np.repeat(prefixes[:, 1], lengths)),
        cu_seqlens=torch.from_numpy(np.concatenate([[0], np.cumsum(lengths)[is_segment]]).astype(np.int32)),
        prefixes_S2=torch.from_numpy(prefixes[is_segment].astype(np.int32)),
        rows_R=torch.from_numpy(rows_R),
        targets_R=torch.from_numpy(np.concatenate([s.target_ids for s in sequences]).astype(np.int64)),
        row_cu_seqlens_B=torch.from_numpy(row_starts.astype(np.int32)),
        sequences=tuple(sequences),
        num_tokens=len(tokens_T) - int(padding),
        routing_TLK=packed_routing([group[0] for group in shared], alone, sequences[len(alone) :], int(padding)),
    )


def _cut_segments(
    lengths: np.ndarray, prefixes: np.ndarray, first: int, sequences: Iterable[tuple[TokenSequence, int]]
) -> tuple[np.ndarray, np.ndarray]:
    """Lengths [S] and prefixes [S, 2] with the sequences, which stand from `first` on, cut where segments begin.

    Each comes with the number of its tokens before the answer.
    """
    cuts = [
        (place, before + int(start))
        for place, (sequence, before) in enumerate(sequences, start=first)
        for start in (() if sequence.segment_starts is None else sequence.segment_starts)
        if before + start < lengths[place]  # else nothing behind it is trained, nor read
    ]
    for place, start in reversed(cuts):
        lengths = np.insert(lengths, place + 1, lengths[place] - start)
        lengths[place] = start
        prefixes = np.insert(prefixes, place + 1, 0, axis=0)
    return lengths, prefixes


def empty_microbatch(multiple: int) -> MicroBatch:
    """Micro-batch of `multiple` padding tokens with nothing trained, for a schedule that needs a fixed count."""
    none = torch.empty(0, dtype=torch.int64)
    return MicroBatch(
        tokens_T=torch.full((multiple,), PADDING_TOKEN),
        positions_T=torch.arange(multiple),
        cu_seqlens=torch.tensor([0, multiple], dtype=torch.int32),
        prefixes_S2=torch.zeros((1, 2), dtype=torch.int32),
        rows_R=none,
        targets_R=none,
        row_cu_seqlens_B=torch.zeros(1, dtype=torch.int32),
        sequences=(),
        num_tokens=0,
    )


def _trained_places(sequence: TokenSequence) -> np.ndarray:
    return np.arange(sequence.num_trained) if sequence.trained_places is None else sequence.trained_places


def _ranges(lengths: np.ndarray) -> np.ndarray:
    """0 .. n-1 for every n of `lengths`, end to end."""
    return np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)
