"""Refusals of packed_objective and the sequence-level part, by the name of what is wrong."""

import math
from dataclasses import asdict, replace

import pytest
import torch
from hacpo_kernels import Bounds, objective_from_mean, packed_objective
from objective_cases import BOUNDS

BAD = {
    "token_logprob": ({"token_logprob": torch.zeros(2, 3)}, r"token_logprob has shape \[2, 3\]; expected \[any\]"),
    "token dtype": ({"token_logprob": torch.zeros(6, dtype=torch.bfloat16)}, "token_logprob has dtype torch.bfloat16"),
    "cu_seqlens end": ({"cu_seqlens": torch.tensor([0, 2, 5])}, "cu_seqlens goes from 0 to 5; expected 0 to 6"),
    "cu_seqlens start": ({"cu_seqlens": torch.tensor([1, 2, 6])}, "cu_seqlens goes from 1 to 6; expected 0 to 6"),
    "negative length": (
        {"cu_seqlens": torch.tensor([0, 8, 6])},
        "cu_seqlens gives sequence 1 a length of -2; expected 0 or more",
    ),
    "cu_seqlens dtype": ({"cu_seqlens": torch.tensor([0.0, 2.0, 6.0])}, "cu_seqlens has dtype torch.float32"),
    "no cu_seqlens": ({"cu_seqlens": torch.zeros(0, dtype=torch.int32)}, "cu_seqlens is empty; expected"),
    "source": ({"source_logprob": torch.zeros(3)}, r"source_logprob has shape \[3\]; expected \[2\]"),
    "advantage": (
        {"advantage": torch.zeros(2).int()},
        "advantage has dtype torch.int32; expected one of torch.float32",
    ),
    "advantage device": ({"advantage": torch.zeros(2, device="meta")}, "advantage is on meta; expected"),
    "is_self": ({"is_self": torch.ones(2)}, "is_self has dtype torch.float32; expected one of torch.bool"),
    "length": ({"length": torch.tensor([1.0, -3.0])}, r"length\[1\] is -3; expected 0 or more tokens"),
    "update_index": ({"update_index": -1}, "update_index is -1; expected 0 or more"),
    "backend": ({"backend": "cuda"}, "backend is 'cuda'; expected auto, triton or reference"),
}


@pytest.mark.parametrize("change, message", BAD.values(), ids=BAD)
def test_bad_input_is_refused_by_name(change, message):
    good = {
        "token_logprob": torch.zeros(6),
        "cu_seqlens": torch.tensor([0, 2, 6]),
        "source_logprob": torch.zeros(2),
        "advantage": torch.zeros(2),
        "is_self": torch.ones(2, dtype=torch.bool),
        "update_index": 0,
        "bounds": BOUNDS,
    }
    with pytest.raises(ValueError, match=message):
        packed_objective(**{**good, **change})


@pytest.mark.parametrize("name", sorted(set(asdict(BOUNDS)) - {"cross"}))
@pytest.mark.parametrize("value", (-1.0, math.nan))
def test_bounds_are_refused_by_name(name, value):
    with pytest.raises(ValueError, match=f"{name} is {value}; expected a number of 0 or more"):
        replace(BOUNDS, **{name: value})


def test_bounds_have_no_defaults():
    with pytest.raises(TypeError, match="missing 10 required positional arguments"):
        Bounds()


def test_an_unknown_objective_is_refused():
    with pytest.raises(ValueError, match="cross is 'bands'; expected one of band, own, truncated, likelihood"):
        replace(BOUNDS, cross="bands")


def test_sequence_level_part_refuses_shapes_that_would_broadcast():
    mean, rest = torch.zeros(3), {"update_index": 0, "bounds": BOUNDS}
    with pytest.raises(ValueError, match=r"advantage has shape \[1\]; expected \[3\]"):
        objective_from_mean(mean, mean, torch.zeros(1), torch.ones(3, dtype=torch.bool), **rest)
    with pytest.raises(ValueError, match=r"seq_logprob has shape \[3, 1\]; expected \[any\]"):
        objective_from_mean(mean[:, None], mean, mean, torch.ones(3, dtype=torch.bool), **rest)
