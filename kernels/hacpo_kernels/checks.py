"""Argument checks before any launch: every error names the argument, the found and the expected value.

Shapes, dtypes and devices are always checked. Values (a label outside the vocabulary, a negative length) are checked
where that is free: in tensors on the CPU. For CUDA tensors a check would stop the queue, so a bad value makes the
kernels return -inf or NaN, and never read out of bounds; pass the integer tensors on the CPU to have them checked.
"""

import torch

FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
LOGPROBS = (torch.float32, torch.float64)
INTEGERS = (torch.int32, torch.int64)


def check_tensor(name: str, tensor: torch.Tensor, shape: tuple[int | None, ...], dtypes: tuple, like=None) -> None:
    """ValueError unless `tensor` has `shape` (None is any size), one of `dtypes`, and the device of `like`."""
    if not isinstance(tensor, torch.Tensor):
        raise ValueError(f"{name} is a {type(tensor).__name__}; expected a tensor")
    if tensor.ndim != len(shape) or any(want not in (None, got) for got, want in zip(tensor.shape, shape)):
        expected = ", ".join("any" if size is None else str(size) for size in shape)
        raise ValueError(f"{name} has shape {list(tensor.shape)}; expected [{expected}]")
    if tensor.dtype not in dtypes:
        raise ValueError(f"{name} has dtype {tensor.dtype}; expected one of {', '.join(map(str, dtypes))}")
    if like is not None and tensor.device != like.device:
        raise ValueError(f"{name} is on {tensor.device}; expected {like.device}, as the other tensors")


def check_linear_logprob(hidden, weight, target, vocab_start, vocab_size, temperature, ignore_index) -> None:
    """ValueError that names the first argument of linear_logprob that does not fit. Labels on CUDA are not read."""
    check_tensor("hidden", hidden, (None, None), FLOATS)
    check_tensor("weight", weight, (None, hidden.shape[1]), (hidden.dtype,), hidden)
    check_tensor("target", target, (len(hidden),), INTEGERS, hidden if target.is_cuda else None)
    if not temperature > 0:
        raise ValueError(f"temperature is {temperature}; expected a number above 0")
    if vocab_start < 0:
        raise ValueError(f"vocab_start is {vocab_start}; expected 0 or more, the global id of this shard's first row")
    if vocab_size < 1:
        raise ValueError(f"vocab_size is {vocab_size}; expected 1 or more, the vocabulary without padding")
    if target.device.type == "cpu":
        outside = (target != ignore_index) & ((target < 0) | (target >= vocab_size))
        if outside.any():
            row = int(outside.nonzero()[0])
            raise ValueError(
                f"target[{row}] is {int(target[row])}; expected a token id in [0, {vocab_size}) "
                f"or ignore_index ({ignore_index})"
            )


def check_segments(token_logprob, cu_seqlens) -> None:
    """Checks the packed layout that packed_objective and segment_sum share: [T] and [B + 1]."""
    check_tensor("token_logprob", token_logprob, (None,), LOGPROBS)
    check_tensor("cu_seqlens", cu_seqlens, (None,), INTEGERS, token_logprob if cu_seqlens.is_cuda else None)
    if len(cu_seqlens) < 1:
        raise ValueError("cu_seqlens is empty; expected the starts of B sequences and the token count: [B + 1] numbers")
    if cu_seqlens.device.type == "cpu":
        ends, num_tokens = cu_seqlens[[0, -1]].tolist(), len(token_logprob)
        if ends != [0, num_tokens]:
            raise ValueError(
                f"cu_seqlens goes from {ends[0]} to {ends[1]}; expected 0 to {num_tokens}, the length of token_logprob"
            )
        lengths = cu_seqlens.diff()
        if (lengths < 0).any():
            row = int((lengths < 0).nonzero()[0])
            raise ValueError(f"cu_seqlens gives sequence {row} a length of {int(lengths[row])}; expected 0 or more")


def check_objective(num_sequences, anchor, source_logprob, advantage, is_self, update_index, length=None) -> None:
    """Checks the [B] tensors of the objective; `anchor` is the tensor whose device the others share.

    The bounds check themselves (bounds.py).
    """
    check_tensor("source_logprob", source_logprob, (num_sequences,), LOGPROBS, anchor)
    check_tensor("advantage", advantage, (num_sequences,), LOGPROBS, anchor)
    check_tensor("is_self", is_self, (num_sequences,), (torch.bool,), anchor)
    if length is not None:
        check_tensor("length", length, (num_sequences,), (*LOGPROBS, *INTEGERS), anchor if length.is_cuda else None)
        if length.device.type == "cpu" and (length < 0).any():
            row = int((length < 0).nonzero()[0])
            raise ValueError(f"length[{row}] is {length[row].item():g}; expected 0 or more tokens")
    if update_index < 0:
        raise ValueError(f"update_index is {update_index}; expected 0 or more, the updates already done in this step")
