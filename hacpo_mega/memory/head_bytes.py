"""Bytes that the log-probs of a micro-batch and their backward take on a device: a formula. Imports no torch.

Not here: what is there beside it (actor_bytes.py), and the kernels themselves (kernels/hacpo_kernels).
"""

from hacpo_mega.models.families.architecture import Architecture
from hacpo_mega.models.sharding.segments import padded_vocab_size

FLOAT32 = 4
# Of kernels/hacpo_kernels, which cannot be imported without torch: rows of the logits' gradient that are held at once,
# and the most of a product that is added to a gradient at once.
TRITON_ELEMENTS, TRITON_ROWS, REFERENCE_ELEMENTS, ADDED_ELEMENTS = 1_250_000_000, 8192, 1 << 24, 1 << 20


def head_bytes(a: Architecture, tp: int, tokens: int, number: int, *, triton: bool) -> int:
    """The most bytes that they take, if all of a rank's `tokens` are trained; a number has so many bytes."""
    columns, mixed = padded_vocab_size(a.vocab_size, tp) // tp, number < FLOAT32
    rows, row = min(tokens, logit_rows(columns, triton=triton)), a.hidden_size
    weight = columns * row * number
    # Summed over the ranks in float32, then cast.
    gradient = tokens * row * (FLOAT32 if tp > 1 else number)
    cast = tokens * row * number if tp > 1 and mixed else 0
    logit = number if triton else FLOAT32
    operand = columns * row * FLOAT32 if mixed and not triton else 0
    # A chunk of logits; its rows of hidden, and a product: the gradient of these, or, in float32, a part of the
    # weight's, before it is added.
    part = 0 if triton or mixed else min(columns * row, ADDED_ELEMENTS)
    in_chunk = rows * (columns * logit + row * number) + max(rows * row, part) * FLOAT32
    # In half precision the weight's gradient goes into Megatron's buffer, and autograd gets a placeholder; in float32
    # it is a tensor of its own from the start.
    placeholder, own = (weight, 0) if mixed else (0, weight)
    at_end = max(gradient + cast, (cast or gradient) + placeholder)
    return operand + own + max(gradient + in_chunk, at_end)


def logit_rows(columns: int, *, triton: bool) -> int:
    """Rows of one chunk of logits over `columns` of the vocabulary, as the kernels choose them."""
    if triton:
        return max(128, min(TRITON_ROWS, TRITON_ELEMENTS // columns // 128 * 128))
    return max(1, REFERENCE_ELEMENTS // columns)
