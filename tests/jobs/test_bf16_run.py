"""Whole runs in bf16 on the CPU, by `agents.dtype`: a run in two parts, what engines answer with, what leaves the run.

One run on policy (dense, a tied head on two tensor ranks), one that is one step off with adapters on experts.
"""

import pytest
import torch
from job import run_here
from run_cases import CHARACTERS, PAIRS, agent_table, require_same_in_two_parts, train, write_watched_config
from safetensors.torch import load_file

from hacpo_mega.checkpoint.files import folder_of, read_checkpoint
from hacpo_mega.checkpoint.stored_agent import stored_agent
from hacpo_mega.logbook.files.metrics import read_metrics
from hacpo_mega.megatron.checkpoint.stored_state import stored_weights
from hacpo_mega.megatron.weights.merging import merged
from hacpo_mega.models.families.architecture import Architecture
from hacpo_mega.models.sharding.lora import adapter_sources, factor_names
from hacpo_mega.models.sharding.segments import all_sources

pytestmark = pytest.mark.nightly
BF16 = {"dtype": "bfloat16"}


@pytest.fixture(scope="module")
def on_policy(tmp_path_factory):
    """Every step on disk, every weight of the engines verified after it was published."""
    folder = tmp_path_factory.mktemp("dense")
    agents = [
        agent_table(folder, "wide", "qwen3", CHARACTERS, tp=2, **BF16),
        agent_table(folder, "plain", "llama", CHARACTERS + PAIRS, **BF16),
    ]
    config = write_watched_config(folder, agents)
    train(config)
    return config


@pytest.fixture(scope="module")
def one_step_off(tmp_path_factory):
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


@pytest.mark.parametrize("which, num_shards", [("on_policy", 3), ("one_step_off", 2)])
def test_a_run_in_two_parts_ends_with_the_same_bits(which, num_shards, request):
    config = request.getfixturevalue(which)
    run = config.parent / "run"
    assert {state.dtype for state in read_checkpoint(folder_of(run, 2)).agents.values()} == {"bfloat16"}
    require_same_in_two_parts(config, run, num_shards)


def test_the_own_ratio_of_a_steps_first_update_is_exactly_one(on_policy):
    steps = read_metrics(on_policy.parent / "run" / "metrics.jsonl")
    for name in ("wide", "plain"):
        assert [steps[step].values[f"agent/{name}/self/first_ratio_error"] for step in (1, 2)] == [0.0, 0.0]


@pytest.mark.parametrize("name", ["wide", "plain"])
def test_exports_are_the_main_weights_rounded_or_not(name, on_policy, tmp_path):
    run = on_policy.parent / "run"
    stored = stored_agent(folder_of(run, 2), name)
    sources = all_sources(Architecture.from_folder(stored.agent.model))
    masters = dict(stored_weights(stored.folder, sources, torch.float32))
    rounded = load_file(run / "agents" / name / "model.safetensors")
    assert {tensor: value.bfloat16().float().equal(rounded[tensor].float()) for tensor, value in masters.items()} == (
        dict.fromkeys(rounded, True)
    )
    whole = exported(run, name, tmp_path / "out", "--dtype", "float32")
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
        assert torch.equal(whole[name], merged(base[name].float(), up, down, lora.scale))
        assert (whole[name] - exact).abs().max() < 1e-6 * exact.abs().max()
    adapter = exported(run, "experts", tmp_path / "adapter", "--adapter", "--dtype", "float32", file="adapter_model")
    assert {value.dtype for value in adapter.values()} == {torch.float32}


def exported(run, name, out, *options, file="model"):
    done = run_here("export", folder_of(run, 2), "--agent", name, "--out", out, *options)
    assert (done.returncode, done.stderr) == (0, "")
    return load_file(out / f"{file}.safetensors")


def test_another_type_is_another_run_and_a_finished_run_is_rounded(on_policy, tmp_path):
    run = on_policy.parent / "run"
    done = run_here("train", on_policy, "num_steps=3", "agents.wide.dtype=float32")
    assert done.returncode == 2
    assert "agents.wide.dtype was 'bfloat16', is 'float32': go on all the same with --accept" in done.stderr
    for options, said in (
        (("--dtype", "float32"), "--dtype is for a checkpoint"),
        (("--dtype", "half"), "--dtype 'half' is not known; there are: float32, bfloat16"),
        (("--dtype", "float32", "--quantize", "fp8"), "--dtype and --quantize exclude each other"),
    ):
        done = run_here("export", run, "--agent", "wide", "--out", tmp_path / "out", *options)
        assert done.returncode == 2 and done.stderr.startswith(said), done.stderr
