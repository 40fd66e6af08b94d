"""The doctor's judgement of differences between log-probs: in bf16 a rare token may be far off, in fp32 none."""

import numpy as np
import pytest
import torch

from hacpo_mega.commands.doctor import TOLERANCES, finding_of, table, worst_of


def found(dtype: torch.dtype, num_off: int, off: float = 3.0, **options):
    """1000 tokens that are 0.01 of the bound apart, `num_off` of them `off` nats."""
    difference_T = np.full(1000, TOLERANCES[dtype] / 100)
    difference_T[:num_off] = off
    return finding_of("a", "Megatron - vLLM", dtype, difference_T, TOLERANCES[dtype], **options)


@pytest.mark.parametrize(
    "dtype, num_off, is_good",
    [
        (torch.float32, 0, True),
        (torch.float32, 1, False),
        (torch.bfloat16, 0, True),
        (torch.bfloat16, 5, True),
        (torch.bfloat16, 50, False),
    ],
)
def test_how_many_tokens_may_be_off(dtype, num_off, is_good):
    assert found(dtype, num_off).is_good is is_good


def test_a_nan_is_never_good():
    for dtype in TOLERANCES:
        assert not found(dtype, 1, float("nan")).is_good
        assert not found(dtype, 1, float("nan"), must_differ=True).is_good


def test_what_must_differ_is_judged_by_its_largest():
    assert found(torch.bfloat16, 1, must_differ=True).is_good
    assert not found(torch.bfloat16, 0, must_differ=True).is_good


def test_the_worst_rank_is_the_one_that_is_judged():
    """Its largest token does not make a rank the worst one where a share of them is what counts."""
    rare, many = found(torch.bfloat16, 1, off=9.0), found(torch.bfloat16, 50, off=1.0)
    assert worst_of([rare, many]) == [many]
    assert table([many]).splitlines()[1].endswith("<= 0.5  BAD")
