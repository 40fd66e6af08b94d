"""The doctor finds nothing wrong with a healthy project, and finds a publish that leaves a stale copy behind."""

import json
from pathlib import Path

import pytest
from job import play_command, run_script, start_ranks

from hacpo_mega.commands.warm_start import create_model
from hacpo_mega.config import InitConfig

pytestmark = pytest.mark.nightly

CONFIG = """
run_dir = "{folder}/run"
num_steps = 1
seed = 4
data = {{ generator = "arithmetic" }}
reward = {{ kind = "arithmetic" }}
rollout = {{ rollouts_per_prompt = 2, max_prompt_tokens = 8, max_answer_tokens = 40, temperature = 0.7 }}
training = {{ prompts_per_step = 4, prompts_per_update = 4, max_tokens_per_microbatch = 256 }}
agents = [
  {{ name = "tied", model = "{folder}/tied", tp = 2, offload = "optimizer" }},
  {{ name = "untied", model = "{folder}/untied" }},
]
"""
COMPARISONS = {
    "Megatron - vLLM",
    "Megatron - vLLM, as it sampled",
    "Megatron - Hugging Face",
    "moved by one update",
    "Megatron - vLLM after it",
}


@pytest.fixture(scope="module")
def config_file(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("doctor")
    for name, family in (("tied", "qwen3"), ("untied", "mistral")):
        sizes = {"num_layers": 2, "hidden_size": 64, "num_heads": 2, "num_kv_heads": 2, "head_dim": 32, "ffn_size": 96}
        vocabulary = tuple("0123456789+-*=,;s")
        init = InitConfig(family=family, tied_embeddings=name == "tied", vocabulary=vocabulary, **sizes)
        create_model(folder / name, init, seed=1)
    file = folder / "config.toml"
    file.write_text(CONFIG.format(folder=folder))
    return file


@pytest.fixture(scope="module")
def reports(config_file) -> list[dict]:
    """Findings by rank; the tied agent has ranks 0 and 1, the untied one rank 2."""
    run_script("doctor_job", 3, config_file, config_file.parent)
    return [json.loads((config_file.parent / f"{rank}.json").read_text()) for rank in range(3)]


def by_name(findings: list[dict]) -> dict[str, dict]:
    return {finding["comparison"]: finding for finding in findings}


def test_a_healthy_project_passes(reports):
    for rank, agent in enumerate(("tied", "tied", "untied")):
        findings = by_name(reports[rank]["healthy"])
        # Hugging Face is asked once per agent
        assert findings.keys() == COMPARISONS - ({"Megatron - Hugging Face"} if rank == 1 else set())
        for finding in findings.values():
            assert finding["agent"] == agent
            assert finding["is_good"], finding
            assert finding["mean"] <= finding["largest"]
        # the random sequences alone: 2, half of 47 and 47 tokens, each less the first
        assert findings["Megatron - vLLM"]["num_tokens"] > 1 + 23 + 46
        assert findings["moved by one update"]["largest"] > 0.1


def test_a_stale_copy_is_found(reports):
    """Only the tied model has it: first from the random start, and after the update from before it."""
    for rank in (0, 1):
        findings = by_name(reports[rank]["forgetful"])
        assert findings["Megatron - vLLM after it"]["largest"] > 0.01
        bad = {name for name, finding in findings.items() if not finding["is_good"]}
        assert bad == {"Megatron - vLLM", "Megatron - vLLM, as it sampled", "Megatron - vLLM after it"}
    assert all(finding["is_good"] for finding in reports[2]["forgetful"])


def test_the_command_says_so_by_its_exit_code(config_file, tmp_path):
    """No two implementations agree to 1e-12 in fp32, so this tolerance must fail. The agents take turns."""
    shared = (str(config_file), "placement=shared", "--tolerance", "1e-12")
    ranks = start_ranks(3, tmp_path, play_command, "doctor", *shared)
    for rank in ranks:
        rank.join()
    assert [rank.exitcode for rank in ranks] == [1, 1, 1], (tmp_path / "0.err").read_text()
    printed = [line for rank in range(3) for line in (tmp_path / f"{rank}.out").read_text().splitlines()]
    lines = [line for line in printed if "Megatron - vLLM" in line]
    assert len(lines) == 6
    assert all(line.endswith("<= 1e-12  BAD") for line in lines)
    moved = [line for line in printed if "moved by one update" in line]
    assert [line.endswith("> 1e-12  ok") for line in moved] == [True, True]
