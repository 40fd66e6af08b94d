"""Memory of engines that quantize, by hand, what is refused of them, and what is suggested beside them."""

from types import SimpleNamespace

import pytest
from plan_cases import write_small_job
from typer.testing import CliRunner

from hacpo_mega.cli.app import app
from hacpo_mega.config.checks.checks import expert_problems
from hacpo_mega.memory.actor_bytes import ActorPlan
from hacpo_mega.memory.budget import EnginePlan, bucket_bytes, engine_weights, waiting_bytes
from hacpo_mega.models.public import public_architecture
from hacpo_mega.models.sharding.layout import Layout

HIDDEN, FFN, KV, VOCAB, LAYERS = 4096, 14336, 1024, 128256, 32
PLAIN = 2 * (2 * VOCAB * HIDDEN + (2 * LAYERS + 1) * HIDDEN)  # embedding, head and norms in bf16
# Rows and columns of a layer's four matrices at a rank of an engine over 2.
MATRICES = (((HIDDEN + 2 * KV) // 2, HIDDEN), (HIDDEN, HIDDEN // 2), (FFN, HIDDEN), (HIDDEN, FFN // 2))
NUMBERS = sum(rows * columns for rows, columns in MATRICES)
OF_LAYER = {
    None: 2 * NUMBERS,
    "fp8": NUMBERS + 4 * 4,
    "fp8_per_tensor": NUMBERS + 4 * 4,
    "fp8_per_channel": NUMBERS + 4 * ((HIDDEN + 2 * KV) // 2 + HIDDEN + FFN + HIDDEN),
    "fp8_per_block": NUMBERS + 4 * NUMBERS // 128**2,
    "mxfp8": NUMBERS + NUMBERS // 32,
    "mxfp4": NUMBERS // 2 + NUMBERS // 32,
}


def plans(kind: str | None) -> tuple[ActorPlan, EnginePlan]:
    model = public_architecture("meta-llama/Llama-3.1-8B")
    engine = EnginePlan(tp=2, max_tokens=4096, memory_share=0.5, quantization=kind)
    return ActorPlan(model, Layout(tp=2), dp=1, num_tokens=8192), engine


@pytest.mark.parametrize("kind", OF_LAYER)
def test_numbers_and_scales_are_counted(kind):
    """Llama 3.1 8B over 2: what is no matrix of a layer stays as it is."""
    of_ends = PLAIN // 2 + (2 * LAYERS + 1) * HIDDEN  # norms are whole
    assert engine_weights(*plans(kind)) == of_ends + LAYERS * OF_LAYER[kind]


def test_what_waits_to_be_quantized_is_counted():
    """Two buckets of 256 MiB, and the largest matrix twice: of gate and up."""
    assert waiting_bytes(*plans(None)) == 0
    assert waiting_bytes(*plans("fp8")) == 2 * (256 << 20) + 2 * 2 * FFN * HIDDEN
    assert bucket_bytes(plans("fp8")[0]) == 4 * (256 << 20)


def checked(folder, *overrides: str) -> tuple[str, str]:
    """The output of `check`, and its complaints."""
    job = write_small_job(folder)
    result = CliRunner().invoke(app, ["check", str(job), "agents.*.init.head_dim=32", *overrides])
    return result.output, f"{result.exception or ''}"


def test_the_correction_is_suggested_where_an_engine_is_coarser(tmp_path):
    device = "device_memory_gib=80"
    said, problem = checked(tmp_path, device, "agents.a.vllm.quantization=fp8", "agents.b.vllm.kv_cache_dtype=fp8")
    assert not problem, problem
    first, second = (line for line in said.splitlines() if "rollout.engine_correction = 'token'" in line)
    assert first.startswith("agents.a.vllm.quantization = 'fp8': its answers are drawn from a coarser policy")
    assert second.startswith("agents.b.vllm.kv_cache_dtype = 'fp8': ")
    for others in (["rollout.engine_correction=token", "agents.a.vllm.quantization=fp8"], []):
        said, problem = checked(tmp_path, device, *others)
        assert not problem and "coarser" not in said, problem


def test_an_engine_on_the_cpu_quantizes_nothing(tmp_path):
    _, problem = checked(tmp_path, "agents.a.vllm.quantization=fp8")
    assert "agents.a: vllm.quantization: 'fp8' is for bf16 weights on a GPU" in problem
    _, problem = checked(tmp_path, "device_memory_gib=80", "agents.a.dtype=float32", "agents.a.vllm.quantization=fp8")
    assert "agents.a: vllm.quantization: 'fp8' is for bf16 weights on a GPU" in problem


@pytest.mark.parametrize(
    ("kind", "eager", "on_cpu", "model", "refused"),
    [
        ("fp8_per_channel", False, False, "Qwen/Qwen3-30B-A3B", True),
        ("fp8_per_channel", True, False, "Qwen/Qwen3-30B-A3B", False),
        ("fp8_per_channel", False, False, "Qwen/Qwen3-8B", False),
        ("fp8_per_channel", False, True, "Qwen/Qwen3-30B-A3B", False),
        ("fp8_per_tensor", False, False, "Qwen/Qwen3-30B-A3B", False),
    ],
)
def test_graphs_over_experts_by_channel_are_refused(kind, eager, on_cpu, model, refused):
    """Each weight sync makes the strides of cutlass's experts anew; a captured graph has the old ones."""
    agent = SimpleNamespace(router_replay=False, vllm={"quantization": kind, "enforce_eager": eager})
    found = list(expert_problems(agent, public_architecture(model), on_cpu=on_cpu))
    assert [line.partition(". Nearest: ")[2] for line in found] == (
        ["'fp8_per_tensor', or vllm.enforce_eager = true beside it"] if refused else []
    )


def test_what_needs_a_quantized_folder_is_refused(tmp_path):
    _, problem = checked(tmp_path, "device_memory_gib=80", "agents.a.vllm.quantization=awq")
    assert "agents.a: vllm.quantization: 'awq' is for folders that are quantized already" in problem
    assert "Nearest: 'fp8_per_tensor'; known here: fp8, fp8_per_tensor, " in problem
