"""Arguments that vLLM is given on CUDA and on the CPU, as far as the project decides them."""

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from run_cases import CHARACTERS, agent_table, write_config
from tiny_models import SCALED_ROPE, make_model
from transformers import AutoConfig, PreTrainedConfig
from vllm import EngineArgs
from vllm.model_executor.layers.mamba.gdn import qwen_gdn_linear_attn

from hacpo_mega.config.checks import checks
from hacpo_mega.config.load import load_unchecked
from hacpo_mega.models.families.delta_net import DeltaNet
from hacpo_mega.models.families.families import FAMILIES
from hacpo_mega.models.sharding.layout import delta_problem
from hacpo_mega.rollout.cpu.delta_net import sigmoid, softplus
from hacpo_mega.rollout.vllm.engine_spec import CPU_BLOCK_SIZE, EngineSpec

WAITS = ("distributed_timeout_seconds", "cpu_distributed_timeout_seconds")


def spec(folder: Path = Path("model"), **settings) -> EngineSpec:
    return EngineSpec(folder, **{"max_model_len": 64, "dtype": torch.float32, "timeout_s": 77.5, **settings})


def on_cuda(visible_devices: int = 8, expandable_segments: bool = False, **settings) -> dict:
    seen = {"visible_devices": visible_devices, "expandable_segments": expandable_segments}
    return spec(**settings).vllm_arguments(on_cuda=True, **seen)


def test_the_engines_of_a_device_share_its_half():
    assert [on_cuda(agents_on_device=count)["gpu_memory_utilization"] for count in (1, 2, 4)] == [0.5, 0.25, 0.125]


@pytest.mark.parametrize("tp, visible, disabled", [(1, 1, False), (2, 1, True), (2, 2, False), (8, 8, False)])
def test_custom_all_reduce_needs_the_peers_devices(tp, visible, disabled):
    assert on_cuda(visible, tensor_parallel_size=tp).get("disable_custom_all_reduce", False) is disabled


@pytest.mark.parametrize("tp, disabled", [(1, False), (2, True)])
def test_custom_all_reduce_and_growing_segments_exclude_each_other(tp, disabled):
    """vLLM's issue 42609: the process ends while graphs are captured, without a traceback."""
    arguments = on_cuda(expandable_segments=True, tensor_parallel_size=tp)
    assert arguments.get("disable_custom_all_reduce", False) is disabled


def test_an_engine_runs_as_many_answers_as_graphs_are_captured_for():
    assert on_cuda()["max_num_seqs"] == 512


def test_the_shell_does_not_decide_what_is_fused():
    assert on_cuda()["compilation_config"] == {"pass_config": {"fuse_allreduce_rms": False}}


def test_delta_nets_read_prompts_without_what_the_shell_has(tmp_path):
    """vLLM's own choice asks for a compiler at the first prompt; no other family has an argument for it."""
    fields = SimpleNamespace(linear_key_head_dim=128, linear_value_head_dim=128)
    made = spec(make_model(tmp_path, "qwen3_5_text"))
    given = EngineArgs(**made.vllm_arguments(on_cuda=True)).gdn_prefill_backend or "auto"
    for capability in (90, 100, 120):
        gpu = SimpleNamespace(
            is_rocm=lambda: False,
            is_xpu=lambda: False,  # vLLM 0.33 asks
            is_cuda=lambda: True,
            is_device_capability=capability.__eq__,
            is_device_capability_family=capability.__eq__,
            get_cuda_runtime_major=lambda: 13,
        )
        for asked, taken in (({}, "flashinfer"), ({"gdn_prefill_backend": given}, "triton")):
            config = SimpleNamespace(additional_config=asked, model_config=SimpleNamespace(hf_text_config=fields))
            with mock.patch.object(qwen_gdn_linear_attn, "current_platform", gpu):
                assert qwen_gdn_linear_attn._resolve_gdn_prefill_backend(config)[1] == taken
    asked = replace(made, options={"gdn_prefill_backend": "flashinfer"}).vllm_arguments(on_cuda=True)
    assert asked["gdn_prefill_backend"] == "flashinfer" and "gdn_prefill_backend" not in on_cuda()


def test_delta_nets_without_a_bfloat16_kernel_on_the_cpu_are_refused(tmp_path, monkeypatch):
    """vLLM would end the run at the first answer."""
    monkeypatch.setattr(checks, "engine_head_sizes", lambda **_how: [32])
    others = DeltaNet(2, 4, 32, 32, 4), DeltaNet(2, 4, 64, 128, 4)
    assert all(map(delta_problem, others)) and delta_problem(DeltaNet(2, 4, 128, 128, 4)) is delta_problem(None) is None
    said = {(8, 12): 1, (64, 64): 0}
    for sizes, problems in said.items():
        fields = dict(zip(("linear_key_head_dim", "linear_value_head_dim"), sizes, strict=True))
        folder = tmp_path / "_".join(map(str, sizes))
        agent = agent_table(folder, "one", "qwen3_5_text", CHARACTERS, {"said": fields}, dtype="bfloat16")
        config = load_unchecked(write_config(folder, [agent]), ())
        found = [line for line in checks.find_problems(config) if "gated delta nets on CPU know 64 or 128" in line]
        assert len(found) == problems
        half = spec(folder / "one", dtype=torch.bfloat16)
        with pytest.raises(ValueError, match="know 64 or 128") if problems else nullcontext():
            half.vllm_arguments(on_cuda=False)


@pytest.mark.parametrize("can_sleep", [True, False])
def test_an_engine_that_never_sleeps_has_no_sleeping_allocator(can_sleep):
    arguments = on_cuda(can_sleep=can_sleep)
    assert (arguments["enable_sleep_mode"], arguments["sleep_mode_offload_cudagraph"]) == (can_sleep, can_sleep)


@pytest.mark.parametrize("mine, of_torch", [(softplus, torch.nn.functional.softplus), (sigmoid, torch.sigmoid)])
def test_a_tokens_numbers_do_not_depend_on_its_place_in_a_step(mine, of_torch):
    """So that turns which arrive in another order have the same bits; torch's own round a tensor's end apart."""
    numbers_TN = 4 * torch.randn(64, 5, generator=torch.Generator().manual_seed(0))
    whole = mine(numbers_TN)
    assert torch.allclose(whole, of_torch(numbers_TN), rtol=1e-6, atol=1e-9)
    assert all(torch.equal(mine(numbers_TN[:n]), whole[:n]) for n in range(1, 64))


def test_on_the_cpu_nothing_sleeps_and_blocks_are_small(tmp_path):
    folder = make_model(tmp_path, "qwen3", num_heads=2, head_dim=32)
    routed = spec(folder, options={"enable_return_routed_experts": True})
    arguments = routed.vllm_arguments(on_cuda=False)
    assert arguments == spec(folder, can_sleep=False).vllm_arguments(on_cuda=False), "and there is no such option"
    assert (arguments["enable_sleep_mode"], arguments["block_size"]) == (False, CPU_BLOCK_SIZE)
    assert routed.returns_routing and "sleep_mode_offload_cudagraph" not in arguments
    assert [arguments[name] for name in WAITS] == [78, 78]


@pytest.mark.parametrize("family, beta", [("gemma3_text", None), ("ministral3", 0.1)])
def test_of_an_image_checkpoint_vllm_is_shown_the_text_model(tmp_path, family, beta):
    """By its class, and with the scale of its queries, which vLLM reads elsewhere; the engine loads its tensors."""
    rope = SCALED_ROPE if beta else None
    images = make_model(tmp_path / "images", family, images=True, num_heads=2, head_dim=32, rope_scaling=rope)
    text = make_model(tmp_path / "text", family, num_heads=2, head_dim=32, rope_scaling=rope)
    shown = {}
    for folder in (images, text):
        arguments = spec(folder).vllm_arguments(on_cuda=False)
        change = arguments.get("hf_overrides", lambda config: config)
        shown[folder] = change(AutoConfig.from_pretrained(folder)).to_dict()
        assert arguments["load_format"] == ("dummy" if folder is images else "safetensors")
        assert change(PreTrainedConfig(model_type="stand-in")).model_type == "stand-in"
    expected = None if beta is None else {"original_max_position_embeddings": 16, "beta": beta}
    for config in shown.values():
        assert config["architectures"] == [FAMILIES[family].architecture]
        assert config.get("llama_4_scaling") == expected
    assert ("hf_overrides" in arguments) == bool(beta), "nothing of a plain text model is changed"
    assert all(shown[images][name] == value for name, value in shown[text].items() if name in MODEL)


MODEL = ("hidden_size", "rope_parameters", "model_type", "tie_word_embeddings", "sliding_window")


def test_users_options_replace_defaults():
    arguments = on_cuda(options={"gpu_memory_utilization": 0.3, "enforce_eager": True})
    assert (arguments["gpu_memory_utilization"], arguments["enforce_eager"]) == (0.3, True)
