"""Export of a trained agent: byte-equal as it is, within a number format's rounding when quantized, and a true card."""

import json
import re
from contextlib import suppress
from pathlib import Path

import pytest
import tomli_w
import torch
from job import play_command, run_here, start_command, start_ranks
from repository import ROOT
from run_cases import train
from safetensors.torch import load_file
from tiny_models import make_model

from hacpo_mega.commands.export import draft_of, export_copy, trained_agent
from hacpo_mega.logbook.metrics import read_metrics
from hacpo_mega.logbook.rollout_log import read_rollouts
from hacpo_mega.samples.tokenizers import make_tokenizer

CHARACTERS = tuple("0123456789+-*=,;s")
GRADER = ROOT / "tests/support/graders.py"

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory) -> Path:
    """The folder of a finished run of two agents, one step long."""
    folder = tmp_path_factory.mktemp("export")
    size = {"num_layers": 2, "hidden_size": 64, "num_heads": 2, "num_kv_heads": 2, "head_dim": 32, "ffn_size": 64}
    agents = []
    for name, family in (("first", "qwen3"), ("second", "llama")):
        make_model(folder / name, family, vocab_size=len(CHARACTERS) + 2, tied=family == "qwen3", **size)
        make_tokenizer(folder / name, CHARACTERS)
        agents.append({"name": name, "model": str(folder / name), "optimizer": {"lr": 1e-3}})
    agents[1]["prompt_template"] = "s{prompt}"
    config = {
        "run_dir": str(folder / "run"),
        "num_steps": 1,
        "agents": agents,
        "data": {"generator": "arithmetic"},
        "algorithm": {"alpha": 2.0, "delta": 0.9},
        "reward": {"kind": f"{GRADER}:share_of_ones"},
        "rollout": {"rollouts_per_prompt": 4, "max_prompt_tokens": 9, "max_answer_tokens": 12},
        "training": {"prompts_per_step": 8, "prompts_per_update": 4, "max_tokens_per_microbatch": 256},
        "evaluation": {"num_prompts": 8},
    }
    (folder / "run.toml").write_text(tomli_w.dumps(config))
    train(folder / "run.toml")
    return folder / "run"


def test_an_exported_agent_is_the_trained_one_byte_by_byte(run_dir, tmp_path):
    done = run_here("export", run_dir, "--agent", "first", "--out", tmp_path / "out")
    assert done.returncode == 0, done.stderr
    trained = {file.name: file.read_bytes() for file in (run_dir / "agents" / "first").iterdir()}
    exported = {file.name: file.read_bytes() for file in (tmp_path / "out").iterdir()}
    card = exported.pop("README.md").decode()
    assert exported == trained and "model.safetensors" in trained
    assert not (tmp_path / "out.part").exists()
    steps = read_metrics(run_dir / "metrics.jsonl")
    for when, step in (("start", 0), ("end", 1)):
        assert f"| held-out accuracy at the {when} | {steps[step].values['agent/first/accuracy']:.4f} |" in card
    commit = json.loads((run_dir / "starts.jsonl").read_text().splitlines()[-1])["commit"]
    assert f"| commit | `{commit}` |" in card
    assert "| alpha, delta, delta_step | 2, 0.9, 0.025 |" in card
    assert "learning from its own answers and those of second." in card


def test_the_log_of_a_run_holds_what_each_agent_read(run_dir):
    prompts = read_rollouts(run_dir, 1)
    assert [prompt["prompt_seen"] for prompt in prompts] == [{"second": f"s{p['prompt']}"} for p in prompts]


def test_the_card_says_how_an_agent_was_asked(run_dir, tmp_path):
    export_copy(trained_agent(run_dir, "second"), tmp_path / "out")
    card = (tmp_path / "out" / "README.md").read_text()
    assert "Prompt:\n\n```\ns{prompt}\n```" in card


def test_an_export_is_whole_or_not_there(tmp_path):
    with suppress(RuntimeError), draft_of(tmp_path / "out") as draft:
        (draft / "half").write_text("")
        raise RuntimeError("in the middle")
    assert not (tmp_path / "out").exists()
    with draft_of(tmp_path / "out") as draft:
        (draft / "whole").write_text("")
    assert [file.name for file in (tmp_path / "out").iterdir()] == ["whole"]


def test_what_is_not_there_is_named(run_dir, tmp_path):
    for arguments, complaint in (
        ((run_dir, "--out", tmp_path / "x"), "trained first, second: say which one with --agent"),
        ((run_dir, "--agent", "third", "--out", tmp_path / "x"), "has no agent 'third'; there are: first, second"),
        ((run_dir, "--agent", "first", "--out", tmp_path), "exists: give a new folder"),
        ((tmp_path, "--out", tmp_path / "x"), "has no config.toml: give the run_dir of a run"),
    ):
        done = run_here("export", *arguments)
        assert done.returncode == 2 and complaint in done.stderr, done.stderr


@pytest.fixture(scope="module")
def fp8(run_dir) -> Path:
    out = run_dir.parent / "fp8"
    # in a fresh process, as a user does: modelopt changes the modules of the process that quantizes
    process = start_command("export", run_dir, "--agent", "first", "--out", out, "--quantize", "fp8")
    _, errors = process.communicate()
    assert process.returncode == 0, errors[-3000:]
    return out


def test_fp8_weights_are_the_trained_ones_but_for_rounding(run_dir, fp8):
    """Largest magnitude on 448, three mantissa bits: an error of at most 1/16 of a weight or half the least step."""
    trained = load_file(run_dir / "agents" / "first" / "model.safetensors")
    stored = load_file(fp8 / "model.safetensors")
    quantized = [name for name, tensor in stored.items() if tensor.dtype == torch.float8_e4m3fn]
    assert len(quantized) == 2 * 7
    for name in quantized:
        scale = stored[f"{name}_scale"].float()
        weight = trained[name].bfloat16().float()
        assert scale.item() == pytest.approx(weight.abs().max().item() / 448, rel=1e-2)
        error = (stored[name].float() * scale - weight).abs()
        assert bool((error <= weight.abs() / 16 + scale * 2**-10 + 1e-6).all()), name
    for name in trained.keys() - set(quantized):
        assert torch.equal(stored[name], trained[name].bfloat16()), name


def test_an_fp8_folder_is_whole(run_dir, fp8):
    assert {file.name for file in (run_dir / "agents" / "first").iterdir()} < {file.name for file in fp8.iterdir()}
    config = json.loads((fp8 / "config.json").read_text())
    assert config["quantization_config"]["quant_algo"] == "FP8"
    card = (fp8 / "README.md").read_text()
    assert re.search(r"fp8 by nvidia-modelopt, calibrated on 8 answers.* mean log-prob: 0\.\d+ nats", card)


def test_vllm_serves_fp8_where_it_has_the_kernels(fp8, tmp_path):
    """On a GPU it answers. vLLM's CPU build reads the folder, and then has no operator that scales to FP8."""
    bench = tmp_path / "bench.jsonl"
    bench.write_text('{"prompt": "1+2=", "answer": "3"}\n')
    options = ("--reward", "exact", "--max-prompt-tokens", "8", "--max-tokens", "8")
    arguments = ["eval", fp8, bench, "--out", tmp_path / "out", *options]
    (rank,) = start_ranks(1, tmp_path, play_command, *map(str, arguments))
    rank.join()
    errors = (tmp_path / "0.err").read_text()
    if torch.cuda.is_available():
        assert rank.exitcode == 0, errors[-3000:]
    else:
        assert rank.exitcode == 1
        assert "RuntimeError: _C::static_scaled_fp8_quant() expected at most 0 argument(s) but received 4" in errors
