"""What the compiler makes of the Triton kernels on Hopper, without a GPU: registers, spills, shared memory, WGMMA.

    python kernels/bench/compile_report.py            one line per kernel and variant

Not a speed: it says that a kernel compiles for sm_90, fits, and does not spill; a benchmark says what that is worth.
"""

import itertools
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

logprob, stash, objective = (
    import_module(f"hacpo_kernels.{name}") for name in ("linear_logprob", "stash", "sequence_objective")
)
TARGET = GPUTarget("cuda", 90, 32)
SHARED_MEMORY = 227 * 1024  # of one Hopper SM
CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"


@dataclass(frozen=True)
class Compiled:
    """What one variant needs: bytes of shared memory, registers per thread, bytes of stack (spills), WGMMA count."""

    name: str
    shared: int
    registers: int
    stack: int
    wgmma: int


def compile_kernel(name: str, kernel, types: dict[str, str], constants: dict, num_warps: int, num_stages: int):
    """Compile for sm_90; pointers, strides and the hidden size are multiples of 16, as with every real model."""
    signature = {arg: "constexpr" if arg in constants else types[arg] for arg in kernel.arg_names}
    aligned = [
        i
        for i, arg in enumerate(kernel.arg_names)
        if arg not in constants and (arg.endswith(("_ptr", "_stride")) or arg == "hidden_size")
    ]
    source = ASTSource(kernel, signature, constants, {(i,): [["tt.divisibility", 16]] for i in aligned})
    built = triton.compile(source, target=TARGET, options={"num_warps": num_warps, "num_stages": num_stages})
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        cubin.write(built.asm["cubin"])
        cubin.flush()
        usage = subprocess.run([CUOBJDUMP, "-res-usage", cubin.name], capture_output=True, text=True, check=True).stdout
    registers, stack = (int(re.search(rf"{field}:(\d+)", usage).group(1)) for field in ("REG", "STACK"))
    return Compiled(name, built.metadata.shared, registers, stack, built.asm["ptx"].count("wgmma.mma_async"))


def types_of(kernel, dtype: str) -> dict[str, str]:
    """Types of arguments by name: the matrices in `dtype`, per-token numbers in float32."""
    types = {}
    for arg in kernel.arg_names:
        if arg.startswith(("target", "index")):
            types[arg] = "*i64"
        elif arg in ("hidden_ptr", "weight_ptr", "stash_ptr", "exp_ptr") or (arg == "out_ptr" and dtype != "none"):
            types[arg] = f"*{dtype}"
        elif arg.endswith("_ptr"):
            types[arg] = "*fp32"
        else:
            types[arg] = "fp32" if arg == "inverse_temperature" else "i32"
    return types


def tile_constants(tiling, **more) -> dict:
    sizes = {name: getattr(tiling, name) for name in ("block_t", "block_v", "block_h", "group_t")}
    return {**sizes, "upcast": False, **more}


def head_kernels(dtype: str):
    """The variants of linear_logprob that dispatch can launch for `dtype`."""
    is_bf16 = dtype == "bf16"
    for entropy, keep in itertools.product((False, True), repeat=2):
        tiling = logprob.FLOAT32 if not is_bf16 else logprob.GRADIENT_BF16 if keep else logprob.STATS_BF16
        constants = tile_constants(
            tiling, with_entropy=entropy, with_stash=keep, tiles_per_split=tiling.tiles_per_split
        )
        name = f"stats {dtype}{' entropy' * entropy}{' stash' * keep}"
        kernel = logprob._stats_kernel
        yield compile_kernel(name, kernel, types_of(kernel, dtype), constants, tiling.num_warps, tiling.num_stages)
    for entropy in (False, True):
        tiling = logprob.GRADIENT_BF16 if is_bf16 else logprob.FLOAT32
        kernel, constants = logprob._gradient_kernel, tile_constants(tiling, with_entropy=entropy)
        name = f"gradient {dtype}{' entropy' * entropy}"
        yield compile_kernel(name, kernel, types_of(kernel, dtype), constants, tiling.num_warps, tiling.num_stages)
        kernel, constants = stash._stash_kernel, {"block_t": 16, "block_v": tiling.block_v, "with_entropy": entropy}
        name = f"from stash {dtype}{' entropy' * entropy}"
        yield compile_kernel(name, kernel, types_of(kernel, dtype), constants, 4, 3)


def small_kernels():
    """The kernels without a matrix product."""
    kernel = logprob._join_kernel
    yield compile_kernel("join", kernel, types_of(kernel, "none"), {"block_t": 64, "with_entropy": True}, 2, 3)
    sizes = {"block_b": 8, "block_t": 512}
    kernel, floats = objective._objective_kernel, {"cu_seqlens_ptr": "*i32", "is_self_ptr": "*i1", "class_ptr": "*i32"}
    types = {arg: "*fp32" if arg.endswith("_ptr") else "fp32" for arg in kernel.arg_names} | floats
    types |= dict.fromkeys(("length_ptr", "total_ptr", "value_ptr"), "*fp64")
    types |= dict.fromkeys(("num_sequences", "num_tokens"), "i32")
    for has_total in (False, True):
        constants = {**sizes, "has_length": has_total, "has_total": has_total}
        yield compile_kernel(f"objective{' total' * has_total}", kernel, types, constants, 8, 3)
    kernel, types = objective._segment_sum_kernel, {**types, "out_ptr": "*fp64"}
    yield compile_kernel("segment sum", kernel, types, sizes, 8, 3)
    kernel, types = objective._totals_kernel, {**types, "pair_ptr": "*fp64", "extreme_ptr": "*fp64"}
    yield compile_kernel("totals", kernel, types, {"block_b": 1024}, 4, 3)


def main() -> int:
    print(f"triton {triton.__version__}, sm_90\n{'kernel':28}{'registers':>10}{'stack':>8}{'shared':>10}{'wgmma':>8}")
    worst = 0
    for built in itertools.chain(head_kernels("bf16"), head_kernels("fp32"), small_kernels()):
        print(f"{built.name:28}{built.registers:10}{built.stack:8}{built.shared:10}{built.wgmma:8}", flush=True)
        worst = max(worst, built.shared)
    return 0 if worst <= SHARED_MEMORY else 1


if __name__ == "__main__":
    sys.exit(main())
