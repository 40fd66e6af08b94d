"""Tokens that the CPU's engine draws: of the softmax, each independent of its neighbours and of the batch's layout.

Fixed seeds, so that a test that passes passes always; the bounds are four standard deviations.
"""

import numpy as np
import pytest
import torch
from job import run_script

from hacpo_mega.rollout.vllm.row_noise import row_keys

WEIGHTS = np.array([0.4, 0.25, 0.15, 0.1, 0.05, 0.03, 0.015, 0.005])
SEEDS = ["answers", "numbered"]
pytestmark = pytest.mark.nightly


@pytest.fixture(scope="module")
def drawn(tmp_path_factory):
    folder = tmp_path_factory.mktemp("noise")
    run_script("noise_job", 1, folder)
    return torch.load(folder / "drawn.pt", weights_only=False)


def assert_fits(counted: np.ndarray, expected: np.ndarray) -> None:
    """Pearson's chi-square. Wilson and Hilferty: the cube root of chi-square / degrees is normal."""
    assert expected.min() >= 5
    degrees = counted.size - 1
    limit = degrees * (1 - 2 / (9 * degrees) + 4 * np.sqrt(2 / (9 * degrees))) ** 3
    assert ((counted - expected) ** 2 / expected).sum() < limit


def assert_independent(first: np.ndarray, second: np.ndarray) -> None:
    pairs = np.bincount((first * len(WEIGHTS) + second).ravel(), minlength=len(WEIGHTS) ** 2)
    assert_fits(pairs, np.outer(WEIGHTS, WEIGHTS).ravel() * first.size)


@pytest.mark.parametrize("seeds", SEEDS)
def test_a_million_tokens_are_drawn_from_the_softmax(drawn, seeds):
    tokens = drawn[seeds]
    assert tokens.size == 1_000_000
    assert_fits(np.bincount(tokens.ravel(), minlength=len(WEIGHTS)), WEIGHTS * tokens.size)


@pytest.mark.parametrize("seeds", SEEDS)
def test_neighbours_in_time_and_in_the_batch_are_independent(drawn, seeds):
    """The next token of an answer, the tenth next, the same place of the next answer and of the next prompt's."""
    tokens = drawn[seeds]
    assert_independent(tokens[:, :-1], tokens[:, 1:])
    assert_independent(tokens[:, :-10], tokens[:, 10:])
    assert_independent(tokens[:-1], tokens[1:])
    assert_independent(tokens[:-8], tokens[8:])
    assert_independent(tokens[:-1, 1:], tokens[1:, :-1])


def test_a_token_does_not_depend_on_the_layout_of_its_batch(drawn):
    """Nor on its prompt's length: where the answer is, counts."""
    seen = drawn["layouts"]
    assert seen["together"] == seen["backwards"] == seen["alone"]
    assert len(set(seen["together"])) > 30


def test_logprobs_are_those_of_the_logits_without_noise(drawn):
    seen = drawn["layouts"]
    torch.testing.assert_close(seen["logprobs"].double(), seen["logits"].double().log_softmax(1), atol=1e-5, rtol=0)
    assert seen["logprobs"].dtype == torch.float32


def test_all_64_bits_of_a_seed_count_and_no_place_of_an_answer_repeats():
    places = np.arange(100_000)
    for seed in (0, 1, 2**63 - 1, 2**64 - 1):
        assert len(np.unique(row_keys(np.full(places.size, seed, np.uint64), places))) == places.size
    one_bit = np.array([1 << bit for bit in range(64)], np.uint64)
    assert len(np.unique(row_keys(one_bit, np.zeros(64, np.int64)))) == 64


def test_a_key_is_splitmix_of_seed_and_place_by_hand():
    """In Python's integers; a resumed run depends on it."""

    def by_hand(seed: int, place: int) -> int:
        key = (seed + (place + 1) * 0xD1342543DE82EF95) % 2**64
        key = (key ^ key >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        key = (key ^ key >> 27) * 0x94D049BB133111EB % 2**64
        return key ^ key >> 31

    cases = [(0, 0), (5, 3), (2**63 - 1, 40_000), (123_456_789_012_345, 1)]
    keys = row_keys(np.array([seed for seed, _ in cases], np.uint64), np.array([place for _, place in cases]))
    assert keys.view(np.uint64).tolist() == [by_hand(*case) for case in cases]
