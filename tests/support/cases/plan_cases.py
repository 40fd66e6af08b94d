"""A small job whose plan can be worked out by hand: two equal models of two layers on a cluster of round numbers.

One model: 64 wide, 4 heads and 2 key/value heads of 16, feed-forward 128, 256 tokens, embedding and head of their own.
    a layer     64 x (64 + 2 x 32) + 64 x 64 + 3 x 64 x 128 = 36,864 numbers in matrices, 2 x 64 in norms
    in all      2 x 36,864 + 2 x 256 x 64 + 5 x 64 = 106,816
    forward     of n tokens: 2 x (2 x 36,864 + 256 x 64) n + 2 x 2 x 4 x 16 n^2 = 180,224 n + 256 n^2 FLOPs
"""

from pathlib import Path
from typing import Any

import tomli_w

MODEL = {
    "family": "llama", "num_layers": 2, "hidden_size": 64, "num_heads": 4, "num_kv_heads": 2, "head_dim": 16,
    "ffn_size": 128, "max_positions": 4096, "tied_embeddings": False,
    "vocabulary": [f"t{number}" for number in range(256)],
}  # fmt: skip
PROMPT, ANSWER, LONGEST = 8, 16, 32
CLUSTER: dict[str, Any] = {
    "processor": "cpu",
    "nodes": 1,
    "devices_per_node": 8,
    "device": {"memory_gib": 2.0, "peak_tflops": 0.001, "memory_gb_per_s": 1.0, "max_requests": 2},
    "links": {"inside_gb_per_s": 1.0, "between_gb_per_s": 0.5, "latency_us": 1.0},
    "host": {"memory_gib": 4.0},
    "rates": {
        "learn": 0.5, "score": 0.25, "prefill": 0.5, "decode": 0.5, "memory": 1.0, "link": 1.0, "learn_passes": 0.0,
        "score_passes": 0.0, "round_s": 0.01, "request_s": 0.0, "token_s": 0.001, "answer_s": 0.1, "batch_s": 0.0,
        "pool_s": 0.0, "view_s": 0.01, "view_token_s": 0.0, "publish_s": 0.5, "tensor_s": 0.0, "step_s": 1.0,
    },
}  # fmt: skip


def write_small_job(folder: Path, **layout: Any) -> Path:
    """4 prompts of 8 tokens, 2 answers of 16, one update; `layout` is of both agents, `lanes` among it."""
    lanes = layout.pop("lanes", 1)
    names = ("a", "b")
    agents = [{"name": n, "model": str(folder / n), "init": MODEL, "recompute": "none", **layout} for n in names]
    table = {
        "run_dir": str(folder / "run"),
        "num_steps": 2,
        "lanes": lanes,
        "agents": agents,
        "data": {"generator": "arithmetic"},
        "reward": {"kind": "arithmetic", "num_workers": 2},
        "rollout": {"rollouts_per_prompt": 2, "max_prompt_tokens": 16, "max_answer_tokens": LONGEST},
        "training": {"prompts_per_step": 4, "prompts_per_update": 4, "max_tokens_per_microbatch": 64},
    }
    return _write(folder / "job.toml", table)


def write_cluster(folder: Path, table: dict[str, Any] = CLUSTER, **changes: Any) -> Path:
    """A cluster's file; a change of a table changes some of its keys."""
    merged = {key: {**value, **changes.pop(key, {})} if isinstance(value, dict) else value for key, value in
              table.items()}  # fmt: skip
    return _write(folder / "cluster.toml", merged | changes)


def _write(file: Path, table: dict[str, Any]) -> Path:
    file.write_text(tomli_w.dumps(table), encoding="utf-8")
    return file
