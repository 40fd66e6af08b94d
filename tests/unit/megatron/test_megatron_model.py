"""One process: reading folders, refusing what cannot be run, exporting, and the platform that lets Megatron run here.

A model's numbers are tested in test_megatron_layout.py, faults of a folder or a layout in test_model_folders.py and
test_layout.py.
"""

import json
import math
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hacpo_kernels import gated_activation, rotate_heads
from megatron.core import parallel_state
from safetensors.torch import load_file, save_file
from tiny_models import LLAMA3_ROPE, make_model

from hacpo_mega.cluster.watchdog import RunStopped
from hacpo_mega.megatron.actor import initialize_parallel
from hacpo_mega.megatron.model import linear, rope
from hacpo_mega.megatron.model.model import build_model, forward_packed
from hacpo_mega.megatron.model.platform import megatron_platform
from hacpo_mega.megatron.weights import hf_writer
from hacpo_mega.megatron.weights.names import load_hf_weights
from hacpo_mega.megatron.weights.reshard import full_tensors, save_hf
from hacpo_mega.models.families.architecture import Architecture
from hacpo_mega.models.families.rope import Llama3Rope

without_cuda = pytest.mark.skipif(torch.cuda.is_available(), reason="the platform changes nothing beside CUDA")


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> Iterator[None]:
    """This process as an agent's only rank."""
    store = dist.FileStore(str(tmp_path_factory.mktemp("store") / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    initialize_parallel(1, 1, seed=1)
    yield
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    """A folder that no test writes to."""
    return make_model(tmp_path_factory.mktemp("source"), "qwen3", tied=True)


@pytest.fixture
def folder(tmp_path) -> Path:
    """A folder of the test's own."""
    return make_model(tmp_path / "model", "qwen3", tied=True, num_layers=1)


def loaded(folder: Path, dtype: torch.dtype = torch.float32, **options: dict) -> torch.nn.Module:
    model = build_model(Architecture.from_folder(folder), tp=1, pp=1, dtype=dtype, max_positions=64, **options)
    load_hf_weights(model, folder)
    return model


def edit_config(folder: Path, **changes: object) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    return folder


def edit_weights(folder: Path, drop: str = "", **added: torch.Tensor) -> None:
    path = folder / "model.safetensors"
    kept = {name: tensor for name, tensor in load_file(path).items() if name != drop}
    save_file({**kept, **added}, path)


# ---- config.json


def test_old_and_new_rope_layouts_say_the_same(tmp_path):
    folder = make_model(tmp_path, "llama", rope_scaling=LLAMA3_ROPE)
    new = Architecture.from_folder(folder)
    assert new.rope == Llama3Rope(factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0, original_positions=16)
    edit_config(folder, rope_parameters=None, rope_theta=10_000.0, rope_scaling=LLAMA3_ROPE)
    assert Architecture.from_folder(folder) == new


# ---- layouts and overrides


@pytest.mark.parametrize(
    "options, message",
    [
        ({"tp": 3}, r"tp \(3\) must divide the model's 4 attention heads\. Nearest: tp = 2"),
        ({"pp": 3}, r"pp \(3\) is more than the model's 2 layers\. Nearest: pp = 2"),
        ({"max_positions": 300}, r"\(300 tokens\) is beyond the 256 positions of this qwen3 model"),
        ({"overrides": {"no_such_field": 1}}, "no_such_field: no field of Megatron's that has an effect here"),
        ({"overrides": {"hidden_size": 8}}, r"megatron\.hidden_size is decided by this project, from the model folder"),
    ],
)
def test_what_the_model_cannot_have_is_refused(world, source, options, message):
    with pytest.raises(ValueError, match=message):
        build_model(
            Architecture.from_folder(source),
            **{"tp": 1, "pp": 1, "dtype": torch.float32, "max_positions": 64, **options},
        )


def test_a_layout_larger_than_the_world_is_refused(world):
    with pytest.raises(ValueError, match=r"tp \* cp \* pp = 2 \* 1 \* 3 = 6 does not divide the agent's 1 ranks"):
        initialize_parallel(2, 3, seed=1)


# ---- kernels


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of lanes that Triton masks away
@pytest.mark.parametrize("family", ["qwen3", "glm4", "gemma3_text"])
def test_with_cudas_kernels_a_model_computes_the_same(world, tmp_path, monkeypatch, family):
    """Rotations of both forms, whole and in part, with frequencies of a window; silu and gelu."""
    folder = make_model(tmp_path, family, **({"window": 3} if family == "gemma3_text" else {}))
    tokens_T, starts = torch.arange(12) * 5 % 131, torch.tensor([0, 7, 12], dtype=torch.int32)
    positions_T = torch.cat([torch.arange(7), torch.arange(5)])
    found, called = [], []
    for backend in ("reference", "triton"):
        for room, function in ((rope, rotate_heads), (linear, gated_activation)):

            def counted(*given, function=function, chosen=backend, **options):
                called.append(function.__name__)
                return function(*given, backend=chosen, **options)

            monkeypatch.setattr(room, function.__name__, counted)
        model = loaded(folder, overrides={"gradient_accumulation_fusion": False})  # there are no buffers of gradients
        hidden_TH = forward_packed(model, tokens_T, positions_T, starts)
        (hidden_TH * torch.linspace(-1, 1, hidden_TH.shape[1])).sum().backward()
        gradients = {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}
        found.append({"hidden": hidden_TH.detach(), **gradients})
    few, many = found
    layers = Architecture.from_folder(folder).num_layers
    assert called == (["rotate_heads"] * 2 + ["gated_activation"]) * layers * 2
    assert few.keys() == many.keys() and len(few) > 8
    for name, expected in few.items():
        assert (many[name] - expected).abs().max() <= 2e-5 * expected.abs().max(), name


# ---- weights


def test_pickles_are_refused(world, folder):
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"weights as pickles \(pytorch_model\.bin\)"):
        loaded(folder)


def test_a_missing_tensor_is_named(world, folder):
    edit_weights(folder, drop="model.layers.0.self_attn.k_norm.weight")
    with pytest.raises(ValueError, match=r"lacks 1 tensors .* model\.layers\.0\.self_attn\.k_norm\.weight"):
        loaded(folder)


def test_an_unknown_tensor_is_named(world, folder):
    edit_weights(folder, **{"model.layers.0.mlp.gate_proj.bias": torch.zeros(96)})
    with pytest.raises(ValueError, match=r"1 tensors unknown to qwen3: model\.layers\.0\.mlp\.gate_proj\.bias"):
        loaded(folder)


def test_a_tensor_of_another_shape_is_named(world, folder):
    edit_weights(folder, **{"model.norm.weight": torch.zeros(65)})
    with pytest.raises(ValueError, match=r"model\.norm\.weight has shape \(65,\); config\.json says \(64,\)"):
        loaded(folder)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_numbers_that_are_not_finite_are_named_before_anything_is_trained(world, folder, bad):
    name = "model.layers.0.self_attn.k_proj.weight"
    weight = load_file(folder / "model.safetensors")[name]
    weight[3, 5] = weight[9, 7] = bad
    edit_weights(folder, **{name: weight})
    with pytest.raises(ValueError, match=rf"model\.safetensors: {re.escape(name)} holds 2 numbers that are not finite"):
        loaded(folder)


def test_a_file_missing_from_the_index_is_named(world, tmp_path):
    folder = make_model(tmp_path / "model", "qwen3", max_shard_size="60KB")
    lost = max(folder.glob("model-*.safetensors"))
    lost.unlink()
    with pytest.raises(
        ValueError, match=rf"{re.escape(str(lost))} does not exist, but model\.safetensors\.index\.json names it"
    ):
        loaded(folder)


def test_a_folder_without_weights_is_refused(world, folder):
    (folder / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"holds no safetensors \(model\.safetensors or"):
        loaded(folder)


def test_a_tied_folder_may_keep_its_head(world, folder):
    embedding = load_file(folder / "model.safetensors")["model.embed_tokens.weight"]
    edit_weights(folder, **{"lm_head.weight": embedding.clone()})
    assert torch.equal(dict(full_tensors(loaded(folder)))["model.embed_tokens.weight"], embedding)


# ---- export


def test_a_bf16_folder_comes_back_byte_for_byte(world, tmp_path):
    folder = make_model(tmp_path / "model", "qwen2", tied=False, dtype=torch.bfloat16)
    save_hf(loaded(folder, torch.bfloat16), folder, tmp_path / "out", torch.bfloat16)
    before, after = load_file(folder / "model.safetensors"), load_file(tmp_path / "out" / "model.safetensors")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name].view(torch.int16), after[name].view(torch.int16)) for name in before)


def test_export_converts_and_says_so(world, source, tmp_path):
    save_hf(loaded(source), source, tmp_path / "out", torch.bfloat16)
    before, after = load_file(source / "model.safetensors"), load_file(tmp_path / "out" / "model.safetensors")
    assert all(torch.equal(before[name].bfloat16(), after[name]) for name in before)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"


def test_export_brings_the_tokenizer_and_replaces_the_old_folder(world, folder, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    (out / "stale.txt").write_text("of an earlier export")
    (folder / "tokenizer.json").write_text("{}")
    (folder / "pytorch_model.bin").write_text("weights in another form")
    save_hf(loaded(folder), folder, out, torch.float32)
    names = {path.name for path in out.iterdir()}
    assert names == {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json"}
    assert {path.name for path in tmp_path.iterdir()} == {"model", "out"}


def test_a_failed_export_leaves_the_old_folder(world, source, tmp_path, monkeypatch):
    out = tmp_path / "out"
    out.mkdir()
    (out / "kept.txt").write_text("of an earlier export")
    model, written = loaded(source), []

    def fail_at_the_second_file(tensors, path, metadata):
        written.append(path)
        if len(written) == 2:
            raise OSError("No space left on device")
        save_file(tensors, path, metadata)

    monkeypatch.setattr(hf_writer, "save_file", fail_at_the_second_file)
    with pytest.raises(OSError, match="No space left"):
        save_hf(model, source, out, torch.float32, file_bytes=100_000)
    assert [path.name for path in out.iterdir()] == ["kept.txt"]


@pytest.mark.parametrize("dtype, number", [(torch.float32, math.nan), (torch.float32, -math.inf), (torch.float16, 1e6)])
def test_a_number_that_is_not_finite_is_not_exported(world, source, tmp_path, dtype, number):
    """1e6 is finite in float32, and infinite in float16. The old folder stays, and nothing of the new one."""
    out = tmp_path / "out"
    out.mkdir()
    (out / "kept.txt").write_text("of an earlier export")
    model = loaded(source)
    with torch.no_grad():
        dict(model.named_parameters())["decoder.layers.1.mlp.linear_fc2.weight"][1, 2:4] = number
    text = rf"^{out} is not written: model\.layers\.1\.mlp\.down_proj\.weight holds 2 numbers that are not finite"
    with pytest.raises(RunStopped, match=text):
        save_hf(model, source, out, dtype)
    assert [path.name for path in out.iterdir()] == ["kept.txt"]
    assert list(tmp_path.iterdir()) == [out]


def test_a_tied_embedding_leaves_once_under_its_own_name(world, source):
    names = [name for name, _ in full_tensors(loaded(source))]
    assert names[0] == "model.embed_tokens.weight"
    assert "lm_head.weight" not in names
    assert len(names) == len(set(names))


# ---- forward


def test_a_score_is_the_training_forward_bit_for_bit(world, source):
    model = loaded(source)
    tokens_T = torch.arange(40) * 7 % 131
    pack = tokens_T, torch.cat([torch.arange(25), torch.arange(15)]), torch.tensor([0, 25, 40], dtype=torch.int32)
    training_TH = forward_packed(model, *pack)
    assert training_TH.requires_grad
    with torch.no_grad():
        assert torch.equal(forward_packed(model, *pack), training_TH)
        assert torch.equal(forward_packed(model.eval(), *pack), training_TH)


def test_a_sequence_does_not_see_its_neighbours(world, source):
    model, tokens_T, positions_T = loaded(source), torch.arange(40) * 7 % 131, torch.arange(20).repeat(2)
    other_T = torch.cat([tokens_T[:20], 130 - tokens_T[20:]])
    starts = torch.tensor([0, 20, 40], dtype=torch.int32)
    first_TH, second_TH = (forward_packed(model, tokens, positions_T, starts) for tokens in (tokens_T, other_T))
    assert torch.equal(first_TH[:20], second_TH[:20])
    assert not torch.isclose(first_TH[20:], second_TH[20:]).all(dim=1).any()


# ---- platform


@without_cuda
def test_the_platform_gives_cuda_a_meaning_and_takes_it_away():
    before = torch.cuda.current_device, torch.cuda.manual_seed, torch.cuda.nvtx.range_push
    with pytest.raises(KeyError):
        _fail_inside_the_platform()
    assert before == (torch.cuda.current_device, torch.cuda.manual_seed, torch.cuda.nvtx.range_push)
    assert torch.zeros(2).type() == "torch.FloatTensor"
    with pytest.raises((RuntimeError, AssertionError)):
        torch.zeros(2, device="cuda")


def _fail_inside_the_platform() -> None:
    with megatron_platform(), megatron_platform():
        assert torch.zeros(2, device="cuda").to("cuda:0").cuda().device.type == "cpu"
        assert torch.zeros(2, device=torch.cuda.current_device()).type() == "torch.cuda.FloatTensor"
        raise KeyError
