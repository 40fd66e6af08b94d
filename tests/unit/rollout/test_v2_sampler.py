"""On CUDA vLLM samples by another runner (V2) than on the CPU: what the project relies on holds for its kernels, too.

An answer is a function of weights, prompt and seed; seeds are 63 bits; log-probs are those of what was sampled from.
"""

import pytest
import torch
from v2_sampler import v2_module

VOCAB = 40
pytestmark = pytest.mark.nightly


@pytest.fixture
def sample(monkeypatch):
    gumbel = v2_module("gumbel", monkeypatch)

    def draw(logits_RV: torch.Tensor, seeds: list[int], positions: list[int], temperature: float = 1.0) -> list[int]:
        """A token per row: every row a request of its own, as in a step of decoding."""
        rows = len(logits_RV)
        return gumbel.gumbel_sample(
            logits_RV,
            torch.arange(rows, dtype=torch.int32),
            torch.full((rows,), temperature),
            torch.tensor(seeds),
            torch.tensor(positions),
            apply_temperature=False,
            is_drafting=False,
        ).tolist()

    return draw


def logits(rows: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed))


def test_a_token_does_not_depend_on_who_else_is_in_the_batch(sample):
    logits_RV, seeds, positions = logits(6), [2**62 + 5, 7, 7, 2**33, 1, 0], [3, 900, 901, 0, 12, 4095]
    together = sample(logits_RV, seeds, positions)
    backwards = sample(logits_RV.flip(0).contiguous(), seeds[::-1], positions[::-1])[::-1]
    alone = [sample(logits_RV[r : r + 1], [seeds[r]], [positions[r]])[0] for r in range(6)]
    assert together == backwards == alone


def test_all_bits_of_a_seed_and_the_position_count(sample):
    flat = torch.zeros(30, VOCAB)
    low = sample(flat, [5 + r for r in range(30)], [0] * 30)
    high = sample(flat, [5 + (r << 33) for r in range(30)], [0] * 30)
    along = sample(flat, [5] * 30, list(range(30)))
    assert all(len(set(drawn)) > 10 for drawn in (low, high, along))


def test_tokens_are_drawn_from_the_softmax(sample):
    """Chi-square of 600 draws over 8 tokens: 7 degrees of freedom, beyond 24.3 in one of a thousand such tests."""
    row = torch.tensor([0.0, 1.0, 2.0, -1.0, 0.5, 1.5, -2.0, 0.3])
    drawn = torch.tensor(sample(row.repeat(600, 1), [(r * 2_654_435_761) % 2**63 for r in range(600)], [17] * 600))
    expected = row.softmax(0) * 600
    assert float(((drawn.bincount(minlength=8) - expected) ** 2 / expected).sum()) < 24.3


def test_temperature_zero_is_the_most_likely_token(sample):
    logits_RV = logits(5, seed=3)
    assert sample(logits_RV, [1, 2, 3, 4, 5], [0] * 5, temperature=0.0) == logits_RV.argmax(1).tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logprobs_are_float32_of_the_logits_that_were_given(monkeypatch, dtype):
    module = v2_module("logprob", monkeypatch)
    logits_RV = (logits(7, seed=4) * 5).to(dtype)
    tokens = torch.tensor([[0], [39], [7], [7], [20], [1], [38]])
    found = module.compute_token_logprobs(logits_RV, tokens)
    expected = logits_RV.double().log_softmax(1).gather(1, tokens)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), expected, atol=1e-5, rtol=0)
