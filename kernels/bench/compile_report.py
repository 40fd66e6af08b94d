"""Reports what the compiler makes of the Triton kernels without a GPU: registers, spills, shared memory, WGMMA.

    python kernels/bench/compile_report.py            one line per kernel and variant
    python kernels/bench/compile_report.py 100        the same for sm_100, Blackwell; 80, 86, 89, 120 likewise

Not a speed: it says that a kernel compiles for an architecture, fits, and does not spill; a benchmark says what that is
worth.
"""

import itertools
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

import torch
import triton
from hacpo_kernels.reference import ACTIVATIONS
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

# By import_module, because the package has a function of the first one's name.
logprob, objective, elementwise, experts = (
    import_module(f"hacpo_kernels.{name}")
    for name in ("linear_logprob", "sequence_objective", "elementwise", "experts")
)
ARCHITECTURE = int(sys.argv[1]) if __name__ == "__main__" and len(sys.argv) > 1 else 90
TARGET = GPUTarget("cuda", ARCHITECTURE, 32)
# Most shared memory of a program by compute capability; 227 KiB on Hopper and on Blackwell's data-centre GPUs.
SHARED_MEMORY = {80: 163 * 1024, 86: 99 * 1024, 89: 99 * 1024, 120: 99 * 1024}.get(ARCHITECTURE, 227 * 1024)
CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"

# Variants of the objective: the objective of others' answers, and whether lengths are handed in.
VARIANTS = (
    ("band", False),
    ("band", True),
    ("own", True),
    ("truncated", True),
    ("likelihood", True),
)


@dataclass(frozen=True)
class Compiled:
    """Needs of one variant: bytes of shared memory, registers per thread, bytes of stack (spills), WGMMA count."""

    name: str
    shared: int
    registers: int
    stack: int
    wgmma: int


def compile_kernel(name: str, kernel, types: dict[str, str], constants: dict, num_warps: int, num_stages: int, **more):
    """Compile for TARGET; pointers, strides and widths are multiples of 16, as with every real model."""
    signature = {arg: "constexpr" if arg in constants else types[arg] for arg in kernel.arg_names}
    aligned = [
        i
        for i, arg in enumerate(kernel.arg_names)
        if arg not in constants
        and (arg.endswith(("_ptr", "_stride")) or arg in ("hidden_size", "width", "matrix_rows", "matrix_columns"))
    ]
    source = ASTSource(kernel, signature, constants, {(i,): [["tt.divisibility", 16]] for i in aligned})
    built = triton.compile(source, target=TARGET, options={"num_warps": num_warps, "num_stages": num_stages, **more})
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        cubin.write(built.asm["cubin"])
        cubin.flush()
        usage = subprocess.run([CUOBJDUMP, "-res-usage", cubin.name], capture_output=True, text=True, check=True).stdout
    registers, stack = (int(re.search(rf"{field}:(\d+)", usage).group(1)) for field in ("REG", "STACK"))
    return Compiled(name, built.metadata.shared, registers, stack, built.asm["ptx"].count("wgmma.mma_async"))


def types_of(kernel, pointers: dict[str, str]) -> dict[str, str]:
    """Types of arguments by name: what a kernel annotates, the pointers named here, the other pointers to fp32."""
    types = {}
    for parameter in kernel.params:
        scalar = "fp32" if parameter.name == "inverse_temperature" else "i32"
        default = "*fp32" if parameter.name.endswith("_ptr") else scalar
        types[parameter.name] = parameter.annotation_type or pointers.get(parameter.name, default)
    return types


def head_kernels(dtype: str):
    """The kernels of linear_logprob that walk the vocabulary, as they are launched for `dtype`."""
    pointers = dict.fromkeys(("hidden_ptr", "weight_ptr", "out_ptr"), f"*{dtype}") | {"target_ptr": "*i64"}
    kernels = {"stats": (logprob._stats_kernel, logprob.STATS_BF16)}
    kernels["gradient"] = logprob._gradient_kernel, logprob.GRADIENT_BF16
    for (name, (kernel, wide)), softcap in itertools.product(kernels.items(), (None, 30.0)):
        tiling = logprob.tiling_for({"bf16": torch.bfloat16, "fp32": torch.float32}[dtype], wide, SHARED_MEMORY)
        sizes = ("block_t", "block_v", "block_h", "group_t", "tiles_per_split")
        constants = {size: getattr(tiling, size) for size in sizes if size in kernel.arg_names} | {"upcast": False}
        constants["softcap"], name = softcap, f"{name} {dtype}{' soft cap' * (softcap is not None)}"
        yield compile_kernel(name, kernel, types_of(kernel, pointers), constants, tiling.num_warps, tiling.num_stages)


def small_kernels():
    """The kernels without a matrix product."""
    yield compile_kernel("join", logprob._join_kernel, types_of(logprob._join_kernel, {}), {"block_t": 64}, 2, 3)
    sizes = {"block_b": 8, "block_t": 512}
    doubles = dict.fromkeys(("ratio_ptr", "weight_ptr"), "*fp64")
    pointers = {"cu_seqlens_ptr": "*i32", "is_self_ptr": "*i1"} | doubles
    kernel = objective._objective_kernel
    for cross, has_length in VARIANTS:
        constants = {**sizes, "cross": cross, "has_length": has_length}
        name = f"objective {cross}{' length' * has_length}"
        yield compile_kernel(name, kernel, types_of(kernel, pointers), constants, 8, 3)
    kernel = objective._segment_sum_kernel
    yield compile_kernel("segment sum", kernel, types_of(kernel, {**pointers, "out_ptr": "*fp64"}), sizes, 8, 3)


def layer_kernels(dtype: str):
    """The kernels of a layer, at the sizes of an 8B model: heads of 128 numbers, all or half of them rotated."""
    names = ("gate_up_ptr", "grad_ptr", "in_ptr", "cos_sin_ptr", "weight_ptr", "out_ptr")
    pointers = dict.fromkeys(names, f"*{dtype}")

    def built(name: str, kernel, constants: dict, num_warps: int = 4, **more):
        return compile_kernel(f"{name} {dtype}", kernel, types_of(kernel, pointers), constants, num_warps, 3, **more)

    for activation in ACTIVATIONS:
        constants = {"activation": activation, "block": elementwise.COLUMNS_PER_PROGRAM}
        yield built(f"gated {activation}", elementwise._gated_kernel, constants)
        yield built(f"gated {activation} gradient", elementwise._gated_gradient_kernel, constants)
    pointers |= {"scale_ptr": "*fp32", "sums_ptr": "*fp32"}
    for shape in ((16, 32, 128), (16, 1, 4096), (16, 1, 8192)):
        _, sizes, warps = elementwise._rows_of(torch.empty(shape, device="meta"))
        sizes = dict(zip(("num_heads", "size", "block_r", "block_h"), sizes, strict=True))
        yield built(f"norm of {shape[2]}", elementwise._norm_kernel, sizes, **warps)
        gradient = elementwise._norm_gradient_kernel
        yield built(f"norm of {shape[2]} gradient", gradient, sizes | {"wants_weight": True}, **warps)
    for interleaved, num_pairs in ((False, 64), (True, 64), (False, 32)):
        sizes = {"num_heads": 32, "size": 128, "num_pairs": num_pairs, "interleaved": interleaved, "inverse": False}
        blocks = {"block_r": elementwise.PAIRS_PER_PROGRAM // num_pairs, "block_p": num_pairs}
        name = f"rotary {'neighbours' if interleaved else 'halves'} {2 * num_pairs} of 128"
        yield built(name, elementwise._rotary_kernel, sizes | blocks)
    blocks = {"block_n": elementwise.MERGED_ROWS, "block_m": elementwise.MERGED_COLUMNS}
    yield built("merge", elementwise._merge_kernel, {"rank": 32, **blocks}, enable_fp_fusion=False)


def expert_kernels():
    """The kernels of a mixture of 8 experts a token, in bf16."""
    names = ("rows_ptr", "out_ptr", "grad_ptr", "grad_rows_ptr", "left_ptr", "right_ptr")
    pointers = dict.fromkeys(names, "*bf16") | {"index_ptr": "*i64", "ends_ptr": "*i32"}
    sizes = {"block_k": 8, "block_h": experts.COLUMNS_PER_STEP}
    for has_shares in (True, False):
        kernel, constants = experts._combine_kernel, {**sizes, "has_shares": has_shares}
        yield compile_kernel(f"combine{' shares' * has_shares}", kernel, types_of(kernel, pointers), constants, 4, 3)
    kernel = experts._combine_gradient_kernel
    yield compile_kernel("combine gradient", kernel, types_of(kernel, pointers), sizes, 4, 3)
    kernel = experts._add_grouped_kernel
    tiles = {"block_n": experts.BLOCK_N, "block_k": experts.BLOCK_K, "block_r": experts.BLOCK_R, "upcast": False}
    types = types_of(kernel, pointers)
    yield compile_kernel("grouped gradient", kernel, types, tiles, experts.NUM_WARPS, experts.NUM_STAGES)


def main() -> int:
    print(f"triton {triton.__version__}, sm_{ARCHITECTURE}")
    print(f"{'kernel':40}{'registers':>10}{'stack':>8}{'shared':>10}{'wgmma':>8}")
    worst = 0
    layers = layer_kernels("bf16"), layer_kernels("fp32"), expert_kernels()
    for built in itertools.chain(head_kernels("bf16"), head_kernels("fp32"), small_kernels(), *layers):
        print(f"{built.name:40}{built.registers:10}{built.stack:8}{built.shared:10}{built.wgmma:8}", flush=True)
        worst = max(worst, built.shared)
    return 0 if worst <= SHARED_MEMORY else 1


if __name__ == "__main__":
    sys.exit(main())
