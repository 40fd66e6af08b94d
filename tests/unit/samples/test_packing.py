"""Packing and update planning: nothing lost, nothing mixed, every row predicts the token it is said to predict."""

import dataclasses
from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from hacpo_mega.agent.agent import Agent
from hacpo_mega.agent.policy_loss import sample_columns
from hacpo_mega.records import Sample, TokenSequence
from hacpo_mega.samples.packing import (
    TokenWork,
    deal_answers,
    input_length,
    microbatch,
    pack,
    pack_update,
    plan_updates,
)


def make_sample(
    prompt: int, source: int, rollout: int, *, learner: int = 0, lengths=(3, 4), num_trained=None
) -> Sample:
    rng = np.random.default_rng([prompt, source, rollout])
    prompt_ids = rng.integers(1, 90, lengths[0], dtype=np.int32)
    answer_ids = rng.integers(1, 90, lengths[1], dtype=np.int32)
    num_trained = lengths[1] if num_trained is None else num_trained
    return Sample(
        source=source,
        is_self=source == learner,
        prompt_index=prompt,
        rollout_index=rollout,
        prompt_ids=prompt_ids,
        answer_ids=answer_ids,
        num_trained=num_trained,
        advantage=float(rng.normal()),
        source_logprob=-1.5,
        length=float(num_trained),
    )


def random_samples(num_prompts: int, seed: int) -> list[Sample]:
    rng = np.random.default_rng(seed)
    return [
        make_sample(prompt, source, rollout, lengths=(int(rng.integers(1, 9)), int(rng.integers(1, 20))))
        for prompt in range(num_prompts)
        for source in range(3)
        for rollout in range(2)
    ]


def identity(sample: Sample) -> tuple[int, int, int]:
    return (sample.prompt_index, sample.source, sample.rollout_index)


def test_layout_of_two_sequences_and_a_tail_by_hand():
    first = TokenSequence(np.int32([5, 6]), np.int32([7, 8, 9]), num_trained=2)  # final token untrained
    second = TokenSequence(np.int32([3]), np.int32([4]), num_trained=1)
    batch = microbatch([[first], [second]], multiple=3)
    # first is read as 5 6 7: 6 predicts 7, 7 predicts 8. second is read as 3, which predicts 4. Two tokens of tail.
    assert batch.tokens_T.tolist() == [5, 6, 7, 3, 0, 0]
    assert batch.positions_T.tolist() == [0, 1, 2, 0, 0, 1]
    assert batch.cu_seqlens.tolist() == [0, 3, 4, 6]
    assert batch.rows_R.tolist() == [1, 2, 3]
    assert batch.targets_R.tolist() == [7, 8, 4]
    assert batch.row_cu_seqlens_B.tolist() == [0, 2, 3]
    assert batch.sequences == (first, second)


def test_layout_of_a_shared_prompt_by_hand():
    """5 6 is read once for 7 8 and for 9, which trains one token and so reads none; 3 4 is read with 8, then a tail."""
    long, short = (TokenSequence(np.int32([5, 6]), np.int32(answer), len(answer)) for answer in ([7, 8, 1], [9]))
    alone = TokenSequence(np.int32([3, 4]), np.int32([8, 2]), num_trained=2)
    batch = microbatch([[short, long], [alone]], multiple=4)
    assert batch.tokens_T.tolist() == [5, 6, 3, 4, 8, 7, 8, 0]
    assert batch.positions_T.tolist() == [0, 1, 0, 1, 2, 2, 3, 0]
    assert batch.cu_seqlens.tolist() == [0, 2, 5, 7, 8]
    assert batch.prefixes_S2.tolist() == [[0, 0], [0, 0], [0, 2], [0, 0]]
    assert batch.sequences == (alone, long, short)
    assert batch.rows_R.tolist() == [3, 4, 1, 5, 6, 1]
    assert batch.targets_R.tolist() == [8, 2, 7, 8, 1, 9]
    assert batch.row_cu_seqlens_B.tolist() == [0, 2, 5, 6]
    assert batch.num_tokens == 7


def as_conversation(sample: Sample) -> Sample:
    """The same with a random part of its answer trained, so that others said the rest."""
    rng = np.random.default_rng([*identity(sample), 7])
    places = np.flatnonzero(rng.random(len(sample.answer_ids)) < 0.5).astype(np.int32)
    return dataclasses.replace(sample, trained_places=places, num_trained=len(places))


def test_layout_of_a_conversation_by_hand():
    """5 6 is answered 7 8, another says 9 1, and 2 3 follows: four rows, and only the last token is not read."""
    played = TokenSequence(np.int32([5, 6]), np.int32([7, 8, 9, 1, 2, 3]), 4, trained_places=np.int32([0, 1, 4, 5]))
    batch = microbatch([[played]])
    assert batch.tokens_T.tolist() == [5, 6, 7, 8, 9, 1, 2]
    assert batch.rows_R.tolist() == [1, 2, 5, 6]
    assert batch.targets_R.tolist() == [7, 8, 2, 3]
    cut = dataclasses.replace(played, num_trained=2, trained_places=np.int32([0, 1]))  # nothing own follows
    batch = microbatch([[cut], [cut, cut]])
    assert batch.tokens_T.tolist() == [5, 6, 5, 6, 7, 7, 7]
    assert (batch.rows_R.tolist(), batch.targets_R.tolist()) == ([3, 4, 1, 5, 1, 6], [7, 8] * 3)


def test_layout_of_a_conversation_of_two_segments_by_hand():
    """5 6 is answered 7 8; then 9 1 is a prompt of its own, which 2 3 follows. A shared prompt changes nothing."""
    played = TokenSequence(
        *(np.int32([5, 6]), np.int32([7, 8, 9, 1, 2, 3]), 4),
        **{"trained_places": np.int32([0, 1, 4, 5]), "segment_starts": np.int32([2])},
    )
    batch = microbatch([[played]], multiple=8)
    assert batch.tokens_T.tolist() == [5, 6, 7, 8, 9, 1, 2, 0]
    assert batch.positions_T.tolist() == [0, 1, 2, 3, 0, 1, 2, 0]
    assert (batch.cu_seqlens.tolist(), batch.prefixes_S2.any().item()) == ([0, 4, 7, 8], False)
    assert (batch.rows_R.tolist(), batch.targets_R.tolist()) == ([1, 2, 5, 6], [7, 8, 2, 3])
    batch = microbatch([[played, played]])
    assert batch.tokens_T.tolist() == [5, 6, 7, 8, 9, 1, 2, 7, 8, 9, 1, 2]
    assert batch.positions_T.tolist() == [0, 1, 2, 3, 0, 1, 2, 2, 3, 0, 1, 2]
    assert batch.cu_seqlens.tolist() == [0, 2, 4, 7, 9, 12]
    assert batch.prefixes_S2.tolist() == [[0, 0], [0, 2], [0, 0], [0, 2], [0, 0]]
    assert (batch.rows_R.tolist(), batch.row_cu_seqlens_B.tolist()) == ([1, 2, 5, 6, 1, 7, 10, 11], [0, 4, 8])
    cut = dataclasses.replace(played, num_trained=2, trained_places=np.int32([0, 1]))  # the first alone is
    assert microbatch([[cut]]).cu_seqlens.tolist() == [0, 3]


def as_segments(sample: Sample) -> Sample:
    """A conversation in which a random part of what others said begins a segment."""
    played = as_conversation(sample)
    others = np.setdiff1d(np.arange(1, len(sample.answer_ids)), played.trained_places)
    starts = others[np.random.default_rng([*identity(sample), 8]).random(len(others)) < 0.5]
    return dataclasses.replace(played, segment_starts=starts.astype(np.int32))


def tokens_before(sample: Sample, number: int) -> list[int]:
    """Tokens that predict a token of the answer: of its segment alone."""
    before = [] if sample.segment_starts is None else [start for start in sample.segment_starts if start <= number]
    if before:
        return sample.answer_ids[before[-1] : number].tolist()
    return [*sample.prompt_ids.tolist(), *sample.answer_ids[:number].tolist()]


@pytest.mark.parametrize("packing", [pack, pack_update])
@pytest.mark.parametrize("max_tokens, multiple", [(28, 1), (40, 4), (400, 8), (10_000, 1)])
@pytest.mark.parametrize("kind", [None, as_conversation, as_segments])
def test_every_row_of_shared_prompts_sees_the_prefix_of_its_target(max_tokens, multiple, packing, kind):
    samples = random_samples(num_prompts=6, seed=1)
    if kind is not None:
        samples = [played for played in map(kind, samples) if played.num_trained]
    prompts = {sample.prompt_index: sample.prompt_ids for sample in samples}
    samples = [dataclasses.replace(sample, prompt_ids=prompts[sample.prompt_index]) for sample in samples]
    batches = packing(samples, max_tokens, multiple=multiple, shares_prompts=True)
    assert sorted(identity(s) for b in batches for s in b.sequences) == sorted(identity(s) for s in samples)
    plain = sum(batch.num_tokens for batch in pack_update(samples, max_tokens, multiple=multiple))
    assert sum(batch.num_tokens for batch in batches) < plain
    for batch in batches:
        assert batch.num_tokens <= len(batch.tokens_T) <= max_tokens and len(batch.tokens_T) % multiple == 0
        starts = batch.cu_seqlens.tolist()
        for place, sample in enumerate(batch.sequences):
            rows = range(batch.row_cu_seqlens_B[place], batch.row_cu_seqlens_B[place + 1])
            trained = range(sample.num_trained) if sample.trained_places is None else sample.trained_places.tolist()
            for number, row in zip(trained, rows, strict=True):
                position = int(batch.rows_R[row])
                segment = np.searchsorted(starts, position, side="right") - 1
                first, length = batch.prefixes_S2[segment].tolist()
                seen = [*range(first, first + length), *range(starts[segment], position + 1)]
                assert batch.tokens_T[seen].tolist() == tokens_before(sample, number)
                assert batch.positions_T[seen].tolist() == list(range(len(seen)))
                assert batch.targets_R[row] == sample.answer_ids[number]


def test_the_objective_gets_the_numbers_of_the_samples_in_packed_order():
    long, short = make_sample(0, 0, 0, lengths=(3, 6)), make_sample(0, 1, 0, lengths=(2, 2))
    (batch,) = pack([short, long], 40)  # longest first
    packed = sample_columns(batch.sequences, batch.tokens_T.device)
    assert batch.row_cu_seqlens_B.tolist() == [0, 6, 8]
    assert packed.is_self_B.tolist() == [True, False]
    assert packed.length_B.tolist() == [6.0, 2.0]
    assert packed.source_logprob_B.tolist() == [-1.5, -1.5]
    assert packed.advantage_B.tolist() == [np.float32(long.advantage), np.float32(short.advantage)]


@pytest.mark.parametrize("max_tokens, multiple", [(28, 1), (40, 4), (400, 8), (10_000, 1)])
def test_every_row_reads_the_prefix_of_its_target(max_tokens, multiple):
    samples = random_samples(num_prompts=6, seed=1)
    batches = pack_update(samples, max_tokens, multiple=multiple)
    assert sorted(identity(s) for b in batches for s in b.sequences) == sorted(identity(s) for s in samples)
    for batch in batches:
        assert len(batch.tokens_T) <= max_tokens
        assert len(batch.tokens_T) % multiple == 0
        assert len({sample.is_self for sample in batch.sequences}) == 1, "own and cross samples share a micro-batch"
        for place, sample in enumerate(batch.sequences):
            text = np.concatenate([sample.prompt_ids, sample.answer_ids])
            start = int(batch.cu_seqlens[place])
            for row in range(batch.row_cu_seqlens_B[place], batch.row_cu_seqlens_B[place + 1]):
                read = int(batch.rows_R[row]) - start + 1
                assert batch.tokens_T[start : start + read].tolist() == text[:read].tolist()
                assert batch.positions_T[start : start + read].tolist() == list(range(read))
                assert batch.targets_R[row] == text[read]
            rows = batch.row_cu_seqlens_B.diff()[place]
            assert rows == sample.num_trained
            assert int(batch.rows_R[batch.row_cu_seqlens_B[place]]) - start == len(sample.prompt_ids) - 1


def test_own_samples_pack_the_same_with_and_without_cross_samples():
    samples = random_samples(num_prompts=8, seed=2)
    own = [sample for sample in samples if sample.is_self]
    with_cross = [batch for batch in pack_update(samples, 50) if batch.sequences[0].is_self]
    alone = pack(own, 50)
    assert len(with_cross) == len(alone) > 1
    for one, other in zip(with_cross, alone, strict=True):
        torch.testing.assert_close(one.tokens_T, other.tokens_T, rtol=0, atol=0)
        assert [identity(s) for s in one.sequences] == [identity(s) for s in other.sequences]


def test_later_updates_pack_all_together_unless_forwards_repeat():
    asked = []
    actor = SimpleNamespace(pack=pack, learn=lambda update, loss_fn, packing: asked.append(packing))
    for replays, repeats in ((False, False), (True, False), (False, True)):
        how = {"_replays_routing": replays, "_scores_by_update": repeats, "_policy_loss": lambda *_: None}
        for update_index in range(3):
            Agent.learn(SimpleNamespace(actor=actor, **how), [], update_index, 1)
    assert asked == [None, pack, pack, *[None] * 6]


@pytest.mark.parametrize("repeats", [False, True])
def test_own_answers_are_scored_in_the_micro_batches_that_learn_from_them(repeats):
    """In bf16 those of every update, in float32 those of the first; of prompt 1 only others want what is written."""
    samples = [sample for sample in random_samples(6, seed=11) if sample.is_self]
    rollouts = [SimpleNamespace(prompt_index=s.prompt_index, rollout_index=s.rollout_index, sample=s) for s in samples]
    per_prompt, scored = len(samples) // 6, []
    agent = SimpleNamespace(
        _prompts_per_update=2, _takes_engine_scores=False, _scores_in_first_update=False,
        _scores_by_update=repeats, _devices=SimpleNamespace(scoring=nullcontext),
        _sequence=lambda text, rollout: rollout.sample, _weighted=lambda score, rollout: score,
        actor=SimpleNamespace(score=lambda sequences: scored.append(pack(sequences, 40)) or [0.0] * len(sequences)),
    )  # fmt: skip
    own_P = torch.tensor([True, False, True, True, True, True])
    prompts = [SimpleNamespace(index=index, text="") for index in range(6)]
    found = Agent.score(agent, prompts, rollouts, own_P, ~own_P[:, None].expand(6, per_prompt))
    assert found == [0.0] * len(samples)
    own = [sample for sample in samples if own_P[sample.prompt_index]]
    learnt = [pack_update(update, 40) for update in plan_updates(own, range(6), 2)]
    as_learnt = learnt if repeats else learnt[:1]
    assert [[identity(s) for b in batches for s in b.sequences] for batches in scored[: len(as_learnt)]] == [
        [identity(s) for b in batches for s in b.sequences] for batches in as_learnt
    ]
    (rest,) = scored[len(as_learnt) :]
    assert {s.prompt_index for b in rest for s in b.sequences} == ({1} if repeats else {1, 2, 3, 4, 5})


def test_together_a_prompt_of_own_and_others_is_read_once():
    samples = [make_sample(0, source, rollout) for source in (0, 1) for rollout in (0, 1)]
    samples = [dataclasses.replace(sample, prompt_ids=samples[0].prompt_ids) for sample in samples]
    apart, together = (how(samples, 40, shares_prompts=True) for how in (pack_update, pack))
    assert [batch.num_tokens for batch in apart] == [3 + 2 * 3] * 2
    assert [batch.num_tokens for batch in together] == [3 + 4 * 3]


def test_first_fit_decreasing_by_hand():
    lengths = [4, 8, 1, 4, 2, 1]  # bins of 10: 8+2, 4+4+1+1
    samples = [make_sample(i, 0, 0, lengths=(1, length)) for i, length in enumerate(lengths)]
    assert [input_length(s) for s in samples] == lengths
    assert [[input_length(s) for s in b.sequences] for b in pack(samples, 10)] == [[8, 2], [4, 4, 1, 1]]


def test_as_many_as_fit_share_a_prompt_by_hand():
    """A prompt of 3 tokens and three each of its answers, the last one of which is not read: 12 with three answers."""
    answers = [TokenSequence(np.int32([5, 6, 7]), np.int32([1, 2, 3, n]), num_trained=4) for n in range(4)]
    batches = pack(answers, 12, shares_prompts=True)
    assert [(len(batch.sequences), len(batch.tokens_T)) for batch in batches] == [(3, 12), (1, 6)]


def test_samples_without_trained_tokens_are_left_out():
    samples = [make_sample(0, 0, 0, num_trained=0), make_sample(0, 0, 1), make_sample(0, 1, 0, num_trained=0)]
    assert [identity(s) for b in pack(samples, 20) for s in b.sequences] == [(0, 0, 1)]
    assert pack([samples[0]], 20) == []


def test_too_long_and_uneven_are_refused_with_numbers():
    with pytest.raises(ValueError, match=r"answer are 12, more than max_tokens_per_microbatch \(11\)"):
        pack([make_sample(0, 0, 0, lengths=(5, 8))], 11)
    with pytest.raises(AssertionError):
        pack([make_sample(0, 0, 0)], 11, multiple=4)
    with pytest.raises(AssertionError):
        plan_updates([], [0, 1, 2], 2)
    with pytest.raises(KeyError):
        plan_updates([make_sample(7, 0, 0)], [0, 1], 2)


def test_updates_hold_whole_prompts_in_own_then_cross_order():
    samples = random_samples(num_prompts=6, seed=3)
    prompts = [4, 5, 2, 3, 0, 1]
    updates = plan_updates(samples, prompts, prompts_per_update=2)
    assert [sorted({s.prompt_index for s in update}) for update in updates] == [[4, 5], [2, 3], [0, 1]]
    for update in updates:
        assert [s.is_self for s in update] == [True] * 4 + [False] * 8, "1 : N-1 in every update"
    assert [identity(s) for s in updates[0][:4]] == [(4, 0, 0), (4, 0, 1), (5, 0, 0), (5, 0, 1)]
    shuffled = [samples[i] for i in np.random.default_rng(4).permutation(len(samples))]
    again = plan_updates(shuffled, prompts, prompts_per_update=2)
    assert [[identity(s) for s in u] for u in again] == [[identity(s) for s in u] for u in updates]


def test_an_update_whose_prompts_were_all_dropped_stays_as_an_empty_one():
    samples = [s for s in random_samples(num_prompts=4, seed=5) if s.prompt_index >= 2]
    assert [len(update) for update in plan_updates(samples, [0, 1, 2, 3], 2)] == [0, 12]


@pytest.mark.parametrize("cells", [2, 4, 8])
@pytest.mark.parametrize("correlation", [0.0, 0.3, 0.5])
@pytest.mark.parametrize("shares_prompts", [True, False])
def test_every_cell_has_as_much_work_as_the_mean(cells, correlation, shares_prompts):
    """Lognormal lengths, cap 4,096, part of whose variance is the prompt's: 64 prompts an update, 8 answers of each."""
    random = np.random.default_rng(cells)
    of_prompt, of_answer = random.normal(size=(128, 1, 1)), random.normal(size=(128, 2, 8))
    spread = np.sqrt(correlation) * of_prompt + np.sqrt(1 - correlation) * of_answer
    tokens_PNG = np.minimum(4096, np.exp(7.3 + 0.7 * spread)).astype(np.int64) + 1
    prompt_P = random.integers(50, 1000, 128)
    work = TokenWork(30_000, shares_prompts)
    how = {"learner": 1, "cells": cells, "prompts_per_update": 64, "work": work}
    cell_PNG = deal_answers(tokens_PNG, np.ones_like(tokens_PNG, dtype=bool), prompt_P, **how)
    as_before_PNG = np.broadcast_to(np.arange(128)[:, None, None] % cells, tokens_PNG.shape)
    for update in (slice(64), slice(64, None)):
        args = tokens_PNG[update], prompt_P[update], work, cells
        for agents in (slice(None), slice(1, 2)):  # of the update, and of its own answers, which are also scored
            loads = loads_by_hand(cell_PNG[update], *args, agents)
            assert max(loads) <= 1.02 * sum(loads) / cells
            untouched = loads_by_hand(as_before_PNG[update], *args, agents)
            assert sum(loads) <= 1.02 * sum(untouched), "prompts are not read in many cells"
    assert (cell_PNG != as_before_PNG).mean() < 0.25, "only what evens the cells moves"
    assert np.array_equal(cell_PNG, deal_answers(tokens_PNG, np.ones_like(tokens_PNG, dtype=bool), prompt_P, **how))


def loads_by_hand(cell_PNG, tokens_PNG, prompt_P, work, cells, agents) -> list[int]:
    """Pairs of tokens that each cell computes, matrices counted as `pairs_per_token`, own answers and others' apart."""
    loads = [0] * cells
    for cell in range(cells):
        for p, prompt in enumerate(map(int, prompt_P)):
            for n in range(tokens_PNG.shape[1])[agents]:
                mine = [int(length) for length in tokens_PNG[p, n][cell_PNG[p, n] == cell]]
                prompts = min(1, len(mine)) if work.shares_prompts else len(mine)
                loads[cell] += prompts * (prompt * work.pairs_per_token + prompt**2 // 2)
                loads[cell] += sum(n * work.pairs_per_token + n * prompt + n**2 // 2 for n in mine)
    return loads


def test_a_deal_by_hand():
    """Cell 0 has 90 + 14 + 10 tokens, cell 1 has 40 + 40: the answer of 14 evens them best, and untrained ones stay."""
    trains_PNG = np.array([[[True, True]], [[True, True]], [[True, False]]])
    how = {"learner": 0, "prompts_per_update": 3, "work": TokenWork(10**6, True)}
    tokens_PNG = np.array([[[90, 14]], [[40, 40]], [[10, 99]]])
    dealt = deal_answers(tokens_PNG, trains_PNG, np.array([0, 0, 0]), cells=2, **how)
    assert dealt.tolist() == [[[0, 1]], [[1, 1]], [[0, 0]]]
    assert not deal_answers(tokens_PNG, trains_PNG, np.array([0, 0, 0]), cells=1, **how).any()
    # With a prompt of 60 that cell 1 would have to read for it, the other answer moves: 174 and 140 become 164 and 150.
    tokens_PNG[1] = 70
    dealt = deal_answers(tokens_PNG, trains_PNG, np.array([60, 0, 0]), cells=2, **how)
    assert dealt.tolist() == [[[0, 0]], [[1, 1]], [[1, 0]]]
