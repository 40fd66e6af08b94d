"""Experts that a folder stacks: one matrix of one expert out of a stack, and the stack again.

gpt-oss has for a layer gate_up_proj [E, H, 2 F], gate and up interleaved, down_proj [E, F, H] and a bias of each, or
MXFP4 (OCP Microscaling 1.0) blocks of 32 numbers [E, rows, blocks, 16], two a byte, and their scales [E, rows, blocks].
Image checkpoints of Qwen3.5 and all folders of Gemma 4 have plain stacks: gate_up_proj [E, 2 F, H], gate above up, and
down_proj [E, H, F].
Everywhere else experts have a gate_proj [F, H], an up_proj [F, H] and a down_proj [H, F] each, and the biases of these.
A folder in fp8 has a scale for every block of a matrix, of an expert or not.
Tensors are torch's, and nothing here imports it. Elsewhere: names and shapes (weight_files.py).
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from hacpo_mega.models.files.weight_files import DOWN, FP8_BLOCK, GATE_UP, StoredTensor, parse_expert

Tensor = Any
# The numbers of four bits: a sign, two bits of an exponent, one of a mantissa.
FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
EXPONENT_BIAS = 127


def unpacked_tensor(stored: StoredTensor, read: Callable[[StoredTensor], Tensor]) -> Tensor:
    """The matrix or bias of an expert out of the stack `stored`, or a matrix that is stored in fp8.

    `read` returns the numbers of a stored tensor; of a stack those of one expert.
    """
    whole = read(stored)
    if stored.expert is None:
        assert stored.scales is not None, stored.name
        return unpacked_fp8(whole, read(stored.scales))
    if stored.plain:
        return whole if stored.half is None else whole.chunk(2)[stored.half]
    if stored.scales is not None:
        whole = unpacked_mxfp4(whole, read(replace(stored.scales, expert=stored.expert)))
    elif whole.dim() == 2:
        whole = whole.T
    return whole if stored.half is None else whole[stored.half :: 2]


def unpacked_mxfp4(blocks: Tensor, scales: Tensor) -> Tensor:
    """Numbers, float32 [rows, 32 B], of uint8 blocks [rows, B, 16], the lower half of a byte first, and uint8 scales
    [rows, B]."""
    table = scales[:0].float().new_tensor(FP4)
    numbers = table.new_empty((*blocks.shape[:-1], 2 * blocks.shape[-1]))
    numbers[..., 0::2], numbers[..., 1::2] = table[(blocks & 15).long()], table[(blocks >> 4).long()]
    return numbers.ldexp_(scales.int()[..., None] - EXPONENT_BIAS).flatten(-2)


def unpacked_fp8(numbers: Tensor, scales: Tensor) -> Tensor:
    """Numbers, float32 [rows, columns], of those in fp8 and a scale for every block of 128 rows and columns."""
    rows, columns = numbers.shape
    by_row = scales.float().repeat_interleave(FP8_BLOCK, dim=0)[:rows]
    return numbers.float() * by_row.repeat_interleave(FP8_BLOCK, dim=1)[:, :columns]


def joined_experts(tensors: Iterable[tuple[str, Tensor]], *, plain: bool = False) -> Iterator[tuple[str, Tensor]]:
    """Tensors with gate and up of every expert joined, [H, 2 F], and down as [F, H], as a stack has them.

    Names are the stack's, with the number of the expert before the last part; other tensors pass unchanged. A `plain`
    stack has [2 F, H] and [H, F].
    """
    gates: dict[str, Tensor] = {}
    for name, tensor in tensors:
        parsed = parse_expert(name)
        if parsed is None:
            yield name, tensor
            continue
        block, expert, part, ending = parsed
        joined = f"{block}.{expert}.{_base(part)}{ending}"
        tensor = tensor.T if tensor.dim() == 2 and not plain else tensor
        if part == DOWN:
            yield joined, tensor.contiguous()
        elif joined not in gates:
            gates[joined] = tensor
        else:
            yield joined, _both(gates.pop(joined), tensor, plain=plain)


def _both(gate: Tensor, up: Tensor, *, plain: bool) -> Tensor:
    if plain:
        both = gate.new_empty((2 * len(gate), *gate.shape[1:]))
        both[: len(gate)], both[len(gate) :] = gate, up
        return both
    both = gate.new_empty((*gate.shape[:-1], 2 * gate.shape[-1]))
    both[..., 0::2], both[..., 1::2] = gate, up
    return both


def stack_shapes(shapes: Iterable[tuple[str, Sequence[int]]], *, plain: bool = False) -> dict[str, tuple[int, ...]]:
    """Name -> shape of the tensors of a folder that stacks the experts of these, in the order of `stacked_experts`."""
    stacks: dict[str, tuple[int, ...]] = {}
    for name, shape in shapes:
        parsed = parse_expert(name)
        if parsed is None:
            stacks[name] = tuple(shape)
            continue
        block, expert, part, ending = parsed
        rows, *columns = shape
        width = rows if part == DOWN else 2 * rows
        sizes = (width, *columns) if plain else (*columns, width)
        stacks[f"{block}.{_base(part)}{ending}"] = (int(expert) + 1, *sizes)  # the last expert's number counts
    return stacks


def stacked_experts(
    tensors: Iterable[tuple[str, Tensor]], shapes: Mapping[str, Sequence[int]], *, plain: bool = False
) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a folder of these shapes (`stack_shapes`): experts, which come in order, stacked."""
    stack = None
    for joined, tensor in joined_experts(tensors, plain=plain):
        block, _, last = joined.rpartition(".")
        block, _, expert = block.rpartition(".")
        name = f"{block}.{last}"
        if joined in shapes:
            yield joined, tensor
            continue
        stack = tensor.new_empty(shapes[name]) if expert == "0" else stack
        stack[int(expert)] = tensor
        if int(expert) + 1 == len(stack):
            yield name, stack


def _base(part: str) -> str:
    return DOWN if part == DOWN else GATE_UP
