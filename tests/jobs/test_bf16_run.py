"""A whole run in bf16 on the CPU, by `agents.dtype`: in two parts, and what leaves it.

A dense agent beside one with adapters on experts, one step off. The own ratio of 1 is test_actor_bf16.py's.
"""

import pytest
import torch
from hacpo_kernels import merge_adapter
from job import run_here
from run_cases import CHARACTERS, PAIRS, agent_table, require_same_in_two_parts, train, write_watched_config
from safetensors.torch import load_file

from hacpo_mega.checkpoint.files import folder_of, read_checkpoint
from hacpo_mega.checkpoint.stored_agent import stored_agent
from hacpo_mega.megatron.checkpoint.stored_state import stored_weights
from hacpo_mega.models.families.architecture import Architecture
from hacpo_mega.models.sharding.lora import adapter_sources, factor_names
from hacpo_mega.models.sharding.segments import all_sources

pytestmark = pytest.mark.nightly
BF16 = {"dtype": "bfloat16"}


@pytest.fixture(scope="module")
def one_step_off(tmp_path_factory):
    """Every step on disk, every weight of the engines verified after it was published."""
    folder = tmp_path_factory.mktemp("ahead")
    lora = {"rank": 4, "alpha": 8.0}
    agents = [
        agent_table(folder, "dense", "llama", CHARACTERS, **BF16),
        agent_table(folder, "experts", "qwen3_moe", CHARACTERS + PAIRS, lora=lora, **BF16),
    ]
    rollout = {"rollouts_per_prompt": 4, "max_prompt_tokens": 8, "max_answer_tokens": 12, "one_step_off": True}
    config = write_watched_config(folder, agents, rollout=rollout)
    train(config)
    return config


def test_a_run_in_two_parts_ends_with_the_same_bits(one_step_off):
    run = one_step_off.parent / "run"
    assert {state.dtype for state in read_checkpoint(folder_of(run, 2)).agents.values()} == {"bfloat16"}
    require_same_in_two_parts(one_step_off, run, 2)


def test_exports_are_the_main_weights_rounded_or_not(one_step_off, tmp_path):
    run = one_step_off.parent / "run"
    stored = stored_agent(folder_of(run, 2), "dense")
    sources = all_sources(Architecture.from_folder(stored.agent.model))
    masters = dict(stored_weights(stored.folder, sources, torch.float32))
    rounded = load_file(run / "agents" / "dense" / "model.safetensors")
    assert {tensor: value.bfloat16().float().equal(rounded[tensor].float()) for tensor, value in masters.items()} == (
        dict.fromkeys(rounded, True)
    )
    whole = exported(run, "dense", tmp_path / "out", "--dtype", "float32")
    assert {tensor: torch.equal(value, masters[tensor]) for tensor, value in whole.items()} == (
        dict.fromkeys(masters, True)
    )
    assert any(not torch.equal(whole[tensor], rounded[tensor].float()) for tensor in whole)


def test_adapters_are_merged_in_float32(one_step_off, tmp_path):
    run = one_step_off.parent / "run"
    stored = stored_agent(folder_of(run, 2), "experts")
    architecture = Architecture.from_folder(stored.agent.model)
    lora = stored.agent.adapters(architecture)
    factors = dict(stored_weights(stored.folder, adapter_sources(architecture, lora), torch.float32))
    base = load_file(stored.agent.model / "model.safetensors")
    whole = exported(run, "experts", tmp_path / "out", "--dtype", "float32")
    adapted = [name for name in whole if factor_names(name)[0] in factors]
    assert adapted
    for name in adapted:
        down, up = (factors[factor] for factor in factor_names(name))
        exact = base[name].double() + lora.scale * up.double() @ down.double()
        assert torch.equal(whole[name], merge_adapter(base[name].float(), up, down, lora.scale))
        assert (whole[name] - exact).abs().max() < 1e-6 * exact.abs().max()
    adapter = exported(run, "experts", tmp_path / "adapter", "--adapter", "--dtype", "float32", file="adapter_model")
    assert {value.dtype for value in adapter.values()} == {torch.float32}


def exported(run, name, out, *options, file="model"):
    done = run_here("export", folder_of(run, 2), "--agent", name, "--out", out, *options)
    assert (done.returncode, done.stderr) == (0, "")
    return load_file(out / f"{file}.safetensors")


def test_another_type_is_another_run_and_a_finished_run_is_rounded(one_step_off, tmp_path):
    run = one_step_off.parent / "run"
    done = run_here("train", one_step_off, "num_steps=3", "agents.dense.dtype=float32")
    assert done.returncode == 2
    assert 'agents.dense.dtype was "bfloat16", is "float32": go on all the same with --accept' in done.stderr
    for options, said in (
        (("--dtype", "float32"), "--dtype is for a checkpoint"),
        (("--dtype", "half"), "--dtype 'half' is not known; there are: float32, bfloat16"),
        (("--dtype", "float32", "--quantize", "fp8"), "--dtype and --quantize exclude each other"),
    ):
        done = run_here("export", run, "--agent", "dense", "--out", tmp_path / "out", *options)
        assert done.returncode == 2 and done.stderr.startswith(said), done.stderr
