"""Configurations of small whole runs, and the two ways to run one to its end."""

import shutil
from pathlib import Path

import tomli_w
import torch
from job import run_command, run_here, start_command
from repository import ROOT
from safetensors.torch import load_file
from tiny_models import make_model

from hacpo_mega.checkpoint.files import folder_of, read_checkpoint
from hacpo_mega.cluster.rank_map import RankMap
from hacpo_mega.config import load_config
from hacpo_mega.logbook.files.metrics import read_metrics
from hacpo_mega.logbook.run.provenance import read_starts
from hacpo_mega.samples.tokenizers import make_tokenizer

CHARACTERS = tuple("0123456789+-*=,;s")
PAIRS = ("10", "11", "+1", ",1")
GRADER = ROOT / "tests/support/graders.py"
# Of an engine, for all answers of these runs at once: vLLM walks all blocks of its cache at every weight sync.
CACHE_BYTES = 16 * 2**20
OVERLAP = {"overlap_grad_reduce": True, "overlap_param_gather": True, "bucket_size": 4000}
TRAINING = {"prompts_per_step": 8, "prompts_per_update": 4, "max_tokens_per_microbatch": 256}


def agent_table(
    folder: Path, name: str, family: str, vocabulary: tuple[str, ...], sizes: dict | None = None, **layout
) -> dict:
    """A random model with four heads (so that it splits) and its tokenizer on disk, as an [[agents]] entry."""
    size = {"num_layers": 2, "hidden_size": 32, "num_heads": 4, "num_kv_heads": 2, "head_dim": 32, "ffn_size": 64}
    size |= {"vocab_size": len(vocabulary) + 2, "tied": family == "qwen3", **(sizes or {})}
    make_model(folder / name, family, seed=len(name), **size)
    make_tokenizer(folder / name, vocabulary)
    engine = {"kv_cache_memory_bytes": CACHE_BYTES}
    return {"name": name, "model": str(folder / name), "optimizer": {"lr": 2e-2}, "vllm": engine, **layout}


def write_config(folder: Path, agents: list[dict], **tables) -> Path:
    config = {
        "run_dir": str(folder / "run"),
        "num_steps": 2,
        "agents": agents,
        "data": {"generator": "arithmetic", "skills": ["sub", "mul"]},
        "reward": {"kind": f"{GRADER}:share_of_ones"},
        "rollout": {"rollouts_per_prompt": 4, "max_prompt_tokens": 8, "max_answer_tokens": 12},
        "training": TRAINING,
        "evaluation": {"num_prompts": 8},
    } | tables
    config["logging"] = {"report": "never"} | config.get("logging", {})  # it takes longer than these runs
    path = folder / "run.toml"
    path.write_text(tomli_w.dumps(config))
    return path


def write_watched_config(folder: Path, agents: list[dict], *, diagnose_every: int = 0, **tables) -> Path:
    """The same, with every step on disk and all weights of engines verified."""
    training = TRAINING | {"verify_weights_every": 1, "diagnose_every": diagnose_every}
    return write_config(folder, agents, checkpoint={"every_steps": 1, "keep_every": 1}, training=training, **tables)


def require_same_in_two_parts(config_file: Path, undisturbed: Path, num_shards: int) -> None:
    """A copy of the run, without what it has of step 2, is started again and ends with the same bits on disk."""
    run_dir = shutil.copytree(undisturbed, config_file.parent / "in_two")
    for folder in (folder_of(run_dir, 2), run_dir / "agents"):
        shutil.rmtree(folder)
    train(config_file, f"run_dir={run_dir}")
    assert [start["steps_done"] for start in read_starts(run_dir)] == [0, 1]
    one, other = (read_checkpoint(folder_of(run, 2)) for run in (undisturbed, run_dir))
    shards = [path for path in one.files if path.endswith(".distcp")]
    assert len(shards) == num_shards
    assert [other.files[path] for path in shards] == [one.files[path] for path in shards]


def require_exported_as_by_the_run(undisturbed: Path, agent: str, out: Path) -> None:
    """An agent of the checkpoint after step 2, in every byte of a weight."""
    done = run_here("export", folder_of(undisturbed, 2), "--agent", agent, "--out", out)
    assert (done.returncode, done.stderr) == (0, "")
    require_same_weights(out, undisturbed / "agents" / agent)


def require_same_weights(found: Path, expected: Path) -> None:
    """Asserts that two model folders have the same weights."""
    one, other = (weights_of(folder) for folder in (found, expected))
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in other)


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a model folder by name; an image checkpoint has a file for its tower."""
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


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
