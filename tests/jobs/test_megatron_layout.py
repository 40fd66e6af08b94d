"""A Megatron model made from a Hugging Face folder is that model, at every parallel layout.

Logits and gradients are held against Hugging Face in float64, exported folders against the bytes of the folder that was
loaded. Four gloo processes run all layouts: with tp * pp < 4 they are several cells.
"""

import functools
import json
import operator
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from actor_cases import end_model_parallel
from job import run_group
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import copy_to_tensor_model_parallel_region, vocab_parallel_cross_entropy
from safetensors.torch import load_file
from tiny_models import LLAMA3_ROPE, SCALED_ROPE, YARN_ROPE, auto_class, make_model, reference_model

from hacpo_mega.megatron.actor import initialize_parallel
from hacpo_mega.megatron.model.model import build_model, forward_packed, lm_head_weight, unwrapped, vocab_start
from hacpo_mega.megatron.model.platform import megatron_platform
from hacpo_mega.megatron.weights.names import load_hf_weights
from hacpo_mega.megatron.weights.reshard import full_tensors, save_hf
from hacpo_mega.models.families.architecture import Architecture
from hacpo_mega.models.files.weight_files import LAYER_SCALE, text_name

VOCAB = 131
CASES = {
    "qwen2-biased": {"family": "qwen2", "tied": False, "rope_scaling": {"rope_type": "linear", "factor": 2.5}},
    "qwen3-tied": {"family": "qwen3", "tied": True, "head_dim": 32, "max_shard_size": "60KB"},
    "qwen3-untied": {"family": "qwen3", "tied": False, "num_layers": 3},
    "llama-scaled": {"family": "llama", "tied": True, "rope_scaling": LLAMA3_ROPE},
    # one key/value head: with tp = 2 its rows of the fused projection are cut across ranks
    "llama-one-kv-head": {"family": "llama", "tied": False, "num_kv_heads": 1, "attention_bias": True},
    "mistral-six-layers": {"family": "mistral", "tied": True, "num_layers": 6, "rope_scaling": YARN_ROPE},
    # query, key and value in one stored matrix, gate and up in another; half of a head turns
    "phi3": {"family": "phi3", "tied": False, "window": 9, "rope_scaling": {"partial_rotary_factor": 0.5}},
    # norms after both blocks, and one over all heads of the queries and one over those of the keys, across ranks
    "olmo2": {"family": "olmo2", "tied": False},
    # and layers with a window and angles of their own
    "olmo3": {"family": "olmo3", "tied": False, "window": 7, "rope_scaling": YARN_ROPE, "num_layers": 4},
    # norms by 1 + w around both blocks, windows, two kinds of angles, an embedding that is scaled
    "gemma3": {"family": "gemma3_text", "tied": True, "window": 7, "num_layers": 4},
    # two kinds of heads and of angles, keys that are values, norms on these, a number of each layer, a cap on logits
    "gemma4": {"family": "gemma4_text", "tied": True, "window": 7, "num_layers": 4},
    "gemma4-images": {"family": "gemma4_text", "tied": True, "window": 7, "images": True, "num_kv_heads": 4},
    # and experts beside the feed-forwards, each between norms of their own
    "gemma4-moe": {"family": "gemma4_text", "tied": True, "window": 7, "said": {"enable_moe_block": True}},
    # images of Gemma 3, and queries that grow, beside a vision tower that neither computes
    "gemma3-images": {"family": "gemma3_text", "tied": True, "window": 7, "images": True, "max_shard_size": "60KB"},
    "ministral3-images": {"family": "ministral3", "tied": False, "images": True, "rope_scaling": SCALED_ROPE},
    # gated delta nets beside attention with a gate; norms of nearly nothing would only show rounding errors
    "qwen3.5": {"family": "qwen3_5_text", "tied": True, "num_layers": 4, "said": {"rms_norm_eps": 1e-2}},
    "qwen3.5-images": {
        "family": "qwen3_5_text",
        "tied": False,
        "images": True,
        "num_kv_heads": 1,
        "num_layers": 4,
        "said": {"rms_norm_eps": 1e-2},
    },
    # experts in a plain stack, a shared one with a gate
    "qwen3.5-moe-images": {
        "family": "qwen3_5_moe_text",
        "tied": False,
        "images": True,
        "num_layers": 4,
        "said": {"rms_norm_eps": 1e-2},
    },
    # norms around both blocks, neighbours of half a head turn, gate and up in one stored matrix
    "glm4": {"family": "glm4", "tied": False, "attention_bias": True},
    # every second layer without rotation; a bias on queries, keys and values alone
    "smollm3": {"family": "smollm3", "tied": True, "num_layers": 4, "said": {"no_rope_layers": [1, 0, 1, 0]}},
    "seed-oss": {"family": "seed_oss", "tied": False, "attention_bias": True},
}
LATER = (
    "qwen3.5",
    "qwen3.5-images",
    "qwen3.5-moe-images",
    "gemma3-images",
    "ministral3-images",
    "mistral-six-layers",
    "phi3",
    "olmo2",
    "olmo3",
    "glm4",
    "gemma3",
    "gemma4",
    "gemma4-images",
    "gemma4-moe",
    "smollm3",
    "seed-oss",
)
UNEVEN = {"num_layers_in_first_pipeline_stage": 1, "num_layers_in_last_pipeline_stage": 1}
# (case, tp, pp) -> fields of Megatron's configuration; backward computes activations of this case again
RECOMPUTED = "qwen2-biased"
RUNS: dict[tuple[str, int, int], dict[str, object]] = {
    **{(RECOMPUTED, *layout): {} for layout in [(1, 1), (2, 1), (1, 2), (2, 2)]},
    **{
        (name, tp, 1): {}
        for name in ("qwen3-tied", "qwen3-untied", "llama-scaled", "llama-one-kv-head")
        for tp in (1, 2)
    },
    **{(name, tp, 2): {} for name in ("qwen3-tied", "llama-scaled", "llama-one-kv-head") for tp in (1, 2)},
    # In four whole cells and cut both ways: to cut one way takes no code of a family that the last does not.
    **{(name, size, size): {} for name in LATER for size in (1, 2)},
    # three layers over two stages
    **{("qwen3-untied", tp, 2): {"num_layers_in_first_pipeline_stage": 2} for tp in (1, 2)},
    # more tensor ranks than key/value heads: each head is on two ranks, and on four
    ("qwen3-tied", 4, 1): {},
    ("llama-one-kv-head", 4, 1): {},
    # one, two, two and one layer; then two and four
    ("mistral-six-layers", 1, 4): UNEVEN,
    ("mistral-six-layers", 2, 2): {"num_layers_in_last_pipeline_stage": 4},
}
# Where both ways cut a case, one for each kind of block; and a key/value head on four ranks.
FAST = {(name, 2, 2) for name in ("qwen2-biased", "qwen3-tied", "phi3", "gemma4-moe", "qwen3.5")}
FAST |= {("llama-one-kv-head", 4, 1)}
EACH_RUN = [pytest.param(*run, marks=[] if run in FAST else [pytest.mark.nightly]) for run in RUNS]
# Lengths of the packed sequences of two micro-batches; their sums are multiples of every tp.
PACKS = [(17, 3, 32), (1, 43)]

# ||g - g64|| / ||g64|| of every tensor, by Frobenius' norm: sums in float32, against Hugging Face in float64, whose
# norms, angles and softmax are in float32 whatever the weights are.
GRADIENT_ERROR = 1e-5
# Hugging Face computes a delta net's states in float32 whatever the weights are.
DELTA_ERROR = 2e-5


def packed_batches() -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """(tokens_T, positions_T, cu_seqlens) of every pack."""
    generator = torch.Generator().manual_seed(7)
    batches = []
    for lengths in PACKS:
        tokens_T = torch.randint(VOCAB, (sum(lengths),), generator=generator)
        positions_T = torch.cat([torch.arange(length) for length in lengths])
        batches.append((tokens_T, positions_T, torch.tensor([0, *lengths]).cumsum(0).int()))
    return batches


def targets_of(tokens_T: torch.Tensor) -> torch.Tensor:
    """Any fixed target per token serves a comparison of gradients."""
    return (tokens_T * 5 + 1) % VOCAB


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {name: make_model(root / name, **sizes) for name, sizes in CASES.items()}


@pytest.fixture(scope="module")
def reference(folders) -> Callable[[str], tuple[list[torch.Tensor], dict[str, torch.Tensor]]]:
    """Hugging Face's logits of every pack, sequence by sequence, and its gradients of the mean loss over packs."""

    @functools.cache
    def compute(name: str) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
        model = reference_model(folders[name])
        logits, loss = [], 0.0
        for tokens_T, _, cu_seqlens in packed_batches():
            sequences = tokens_T.split(cu_seqlens.diff().tolist())
            logits_TV = torch.cat([model(sequence[None]).logits[0] for sequence in sequences])
            loss = loss + torch.nn.functional.cross_entropy(logits_TV, targets_of(tokens_T)) / len(PACKS)
            logits.append(logits_TV.detach())
        loss.backward()
        gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
        # An image checkpoint's text model has its gradients under the names of a text checkpoint.
        named = {text_name(name) or name: g for name, g in gradients.items() if g is not None}
        return logits, dict(each_expert(named))

    return compute


def each_expert(gradients: dict[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """The same with the matrices of every expert in the place of Hugging Face's stacks."""
    for name, gradient in gradients.items():
        block, _, last = name.rpartition(".")
        if not block.endswith(".experts"):
            yield name, gradient
            continue
        parts = ("gate_proj", "up_proj") if last == "gate_up_proj" else (last,)
        for expert, matrix in enumerate(gradient):
            for part, half in zip(parts, matrix.chunk(len(parts)), strict=True):
                yield f"{block}.{expert}.{part}.weight", half


@pytest.fixture(scope="module")
def results(folders, tmp_path_factory) -> Callable[[tuple[str, int, int]], list[dict]]:
    """(case, tp, pp) -> what each of four processes saw; `export` is the folder that cell 0 wrote. A job per tier."""

    @functools.cache
    def visit(is_fast: bool) -> list[dict]:
        runs = [run for run in RUNS if (run in FAST) == is_fast]
        return run_group(4, run_layouts, runs, folders, tmp_path_factory.mktemp("exports"))

    return lambda run: [rank[run] for rank in visit(run in FAST)]


WAIT_S = 6.5


def run_layouts(runs: list[tuple], folders: dict[str, Path], exports: Path) -> dict[tuple[str, int, int], dict]:
    seen = {}
    for tp, pp in sorted({(tp, pp) for _, tp, pp in runs}):
        initialize_parallel(tp, pp, seed=1, ep=1)
        for name in [name for name in folders if (name, tp, pp) in runs]:
            export = exports / f"{name}-tp{tp}pp{pp}"
            options = {"recompute": "full" if name == RECOMPUTED else "none", "overrides": RUNS[name, tp, pp]}
            seen[name, tp, pp] = run_case(export, folders[name], tp, pp, options)
        end_model_parallel()
    return seen


def wait_for_nobody() -> dict[str, object]:
    """Time limits of this rank's groups, by what they are for; and a tensor rank that does not come."""
    before, mates = set(dist.distributed_c10d._world.pg_map), dist.distributed_c10d._get_default_store()
    initialize_parallel(2, 2, seed=1, timeout_s=WAIT_S)
    made = [group for group in dist.distributed_c10d._world.pg_map if group not in before]
    waits = {group.group_desc: group._get_backend(torch.device("cpu")).options._timeout for group in made}
    died, tensor_ranks = None, parallel_state.get_tensor_model_parallel_group()
    dist.all_reduce(torch.ones(1), group=tensor_ranks)  # they are connected
    if dist.get_rank() == 0:
        try:
            dist.all_reduce(torch.ones(1), group=tensor_ranks)
        except RuntimeError as error:
            died = str(error)
        mates.set("rank 0 has given up", "")
    mates.wait(["rank 0 has given up"])
    parallel_state.destroy_model_parallel()
    ranks = [tuple(dist.get_process_group_ranks(group)) for group in made]
    return {"waits": {what: wait.total_seconds() for what, wait in waits.items()}, "died": died, "ranks": ranks}


def run_case(export: Path, folder: Path, tp: int, pp: int, options: dict) -> dict:
    cell, place = divmod(dist.get_rank(), tp * pp)
    architecture = Architecture.from_folder(folder)
    model = build_model(architecture, tp=tp, pp=pp, dtype=torch.float32, max_positions=64, **options)
    load_hf_weights(model, folder)
    if cell == 0:
        save_hf(model, folder, export, torch.float32, bucket_bytes=60_000, file_bytes=100_000)
    logits = pipeline(model, forward_only=True)
    gradients = gradients_by_name(model)
    expected_place = (
        parallel_state.get_pipeline_model_parallel_rank() * tp + parallel_state.get_tensor_model_parallel_rank()
    )
    assert place == expected_place, (place, expected_place)
    return {"cell": cell, "logits": logits, "gradients": gradients, "export": export}


def pipeline(model: torch.nn.Module, *, forward_only: bool) -> list[torch.Tensor]:
    """Run the packs through Megatron's schedule; with `forward_only` the last stage answers its shard of the logits."""

    def step(batches, model):
        tokens_T, positions_T, cu_seqlens = next(batches)
        hidden_TH = forward_packed(model, tokens_T, positions_T, cu_seqlens)

        def loss(hidden_TH, non_loss_data=False):
            logits_TV = shard_of_logits(hidden_TH, model)
            if non_loss_data:
                return logits_TV
            value = vocab_parallel_cross_entropy(logits_TV[:, None], targets_of(tokens_T)[:, None]).mean()
            return value, {}

        return hidden_TH, loss

    unwrapped(model).config.variable_seq_lengths = True  # unlike those of schedule.py these packs go as they are
    with megatron_platform(), torch.set_grad_enabled(not forward_only):
        return get_forward_backward_func()(
            forward_step_func=step,
            data_iterator=iter(packed_batches()),
            model=[model],
            num_microbatches=len(PACKS),
            seq_length=max(map(sum, PACKS)),
            micro_batch_size=1,
            forward_only=forward_only,
            collect_non_loss_data=forward_only,
        )


def shard_of_logits(hidden_TH: torch.Tensor, model: torch.nn.Module) -> torch.Tensor:
    """Logits over this rank's vocabulary, padding masked; sums its gradient over the shards, as linear_logprob does."""
    weight_VH = lm_head_weight(model)
    padding_V = vocab_start(model) + torch.arange(len(weight_VH)) >= VOCAB
    logits_TV = copy_to_tensor_model_parallel_region(hidden_TH) @ weight_VH.T
    if (cap := unwrapped(model).architecture.softcap) is not None:
        logits_TV = cap * (logits_TV / cap).tanh()
    return logits_TV.masked_fill(padding_V, float("-inf"))


def gradients_by_name(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Megatron's own data parallelism and gradient reduction; the gradients leave the way weights do."""
    with megatron_platform():
        wrapped = DistributedDataParallel(
            unwrapped(model).config, DistributedDataParallelConfig(grad_reduce_in_fp32=True), model
        )
        wrapped.zero_grad_buffer()
        pipeline(wrapped, forward_only=False)
        finalize_model_grads([wrapped], None)
        for parameter in filter(operator.attrgetter("requires_grad"), model.parameters()):
            parameter.data.copy_(parameter.main_grad)
        tensors = full_tensors(model, bucket_bytes=40_000)
        return {name: tensor for name, tensor in tensors if not name.endswith(LAYER_SCALE)}  # which is not trained


@pytest.mark.parametrize("name, tp, pp", EACH_RUN)
def test_logits_are_hugging_faces(results, reference, name, tp, pp):
    ranks = results((name, tp, pp))
    for cell in range(4 // (tp * pp)):
        shards = [rank["logits"] for rank in ranks if rank["cell"] == cell and rank["logits"]]
        assert len(shards) == tp
        for pack, expected_TV in enumerate(reference(name)[0]):
            logits_TV = torch.cat([shard[pack] for shard in shards], dim=1)[:, :VOCAB]
            torch.testing.assert_close(logits_TV.double(), expected_TV, atol=1e-4, rtol=0)


@pytest.mark.parametrize("name, tp, pp", EACH_RUN)
def test_gradients_are_hugging_faces(results, reference, name, tp, pp):
    for rank in results((name, tp, pp)):
        assert rank["gradients"].keys() == reference(name)[1].keys()
        for tensor_name, exact in reference(name)[1].items():
            error = float((rank["gradients"][tensor_name].double() - exact).norm() / exact.norm())
            most = DELTA_ERROR if name.startswith("qwen3.5") else GRADIENT_ERROR
            assert error <= most, f"{tensor_name}: {error:.1e} of its norm"


@pytest.mark.parametrize("name, tp, pp", EACH_RUN)
def test_export_is_the_loaded_folder_byte_for_byte(results, folders, name, tp, pp):
    export = results((name, tp, pp))[0]["export"]
    assert tensors_of(export) == tensors_of(folders[name])
    assert json.loads((export / "config.json").read_text()) == json.loads((folders[name] / "config.json").read_text())
    auto_class("images" in CASES[name]).from_pretrained(export)


def tensors_of(folder: Path) -> dict[str, tuple[torch.dtype, torch.Size, bytes]]:
    tensors = {}
    for file in folder.glob("*.safetensors"):
        for name, tensor in load_file(file).items():
            tensors[name] = tensor.dtype, tensor.shape, tensor.view(torch.uint8).numpy().tobytes()
    return tensors


@pytest.fixture(scope="module")
def waits() -> list[dict]:
    return run_group(4, wait_for_nobody)


@pytest.mark.nightly
def test_every_group_of_megatron_waits_as_long_as_was_said(waits):
    for seen in waits:
        assert set(seen["waits"].values()) == {WAIT_S}, "Megatron's own are 30 minutes"
        assert {"TENSOR_MODEL_PARALLEL_GROUP", "PIPELINE_MODEL_PARALLEL_GROUP"} < seen["waits"].keys()
        assert len(set(seen["ranks"])) == len(seen["ranks"]), "each group of gloo has threads"


@pytest.mark.nightly
def test_a_collective_that_a_tensor_rank_does_not_come_to_ends(waits):
    assert f"{WAIT_S * 1000:.0f}ms" in waits[0]["died"]
