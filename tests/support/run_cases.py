"""Configurations of small whole runs, and the two ways to run one to its end."""

from pathlib import Path

import tomli_w
from job import run_command, start_command
from repository import ROOT
from tiny_models import make_model

from hacpo_mega.cluster.rank_map import RankMap
from hacpo_mega.config import load_config
from hacpo_mega.logbook.metrics import read_metrics
from hacpo_mega.samples.tokenizers import make_tokenizer

CHARACTERS = tuple("0123456789+-*=,;s")
PAIRS = ("10", "11", "+1", ",1")
GRADER = ROOT / "tests/support/graders.py"


def agent_table(folder: Path, name: str, family: str, vocabulary: tuple[str, ...], **layout) -> dict:
    """A random model with four heads (so that it splits) and its tokenizer on disk, as an [[agents]] entry."""
    size = {"num_layers": 2, "hidden_size": 32, "num_heads": 4, "num_kv_heads": 2, "head_dim": 32, "ffn_size": 64}
    make_model(folder / name, family, vocab_size=len(vocabulary) + 2, tied=family == "qwen3", seed=len(name), **size)
    make_tokenizer(folder / name, vocabulary)
    return {"name": name, "model": str(folder / name), "optimizer": {"lr": 2e-2}, **layout}


def write_config(folder: Path, agents: list[dict], **tables) -> Path:
    config = {
        "run_dir": str(folder / "run"),
        "num_steps": 2,
        "agents": agents,
        "data": {"generator": "arithmetic", "skills": ["sub", "mul"]},
        "reward": {"kind": f"{GRADER}:share_of_ones"},
        "rollout": {"rollouts_per_prompt": 4, "max_prompt_tokens": 8, "max_answer_tokens": 12},
        "training": {"prompts_per_step": 8, "prompts_per_update": 4, "max_tokens_per_microbatch": 256},
        "evaluation": {"num_prompts": 8},
    } | tables
    path = folder / "run.toml"
    path.write_text(tomli_w.dumps(config))
    return path


def train(config_file: Path, *overrides: str) -> dict:
    """Runs a configuration to its end, every rank as srun would start it, and returns its metrics by step."""
    config = load_config(config_file, list(overrides))
    run_command(RankMap.of(config).world_size, "train", config_file, *overrides)
    return read_metrics(config.run_dir / "metrics.jsonl")


def train_as_a_user(config_file: Path, *overrides: str) -> dict:
    """The same by `hacpo-mega train` in a fresh interpreter, which starts its ranks by itself."""
    process = start_command("train", config_file, *overrides)
    _, errors = process.communicate()
    assert process.returncode == 0, errors[-4000:]
    return read_metrics(load_config(config_file, list(overrides)).run_dir / "metrics.jsonl")
