"""Two steps on real MATH problems with two real tokenizers: prompts, LaTeX answers and re-encoding as a user has them.

The models have random weights, so rewards are near zero; what is shown is that nothing breaks and all is counted.
"""

import json
import shutil
from pathlib import Path

import pytest
import tomli_w
from repository import SHARED
from run_cases import train
from tiny_models import make_model

from hacpo_mega.data.datasets import read_dataset, write_dataset
from hacpo_mega.logbook.files.rollout_log import read_rollouts
from hacpo_mega.samples.tokenizers import load_tokenizer

MATH = SHARED / "data" / "math" / "MATH_original_train.tar.gz"
TOKENIZERS = SHARED / "tokenizers"

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(not MATH.exists() or not TOKENIZERS.exists(), reason="real data is not beside the project"),
]

SIZE = {"num_layers": 2, "hidden_size": 32, "num_heads": 2, "num_kv_heads": 1, "head_dim": 32, "ffn_size": 64}


def agent_table(folder: Path, name: str, family: str, tokenizer: str) -> dict:
    vocab_size = len(load_tokenizer(TOKENIZERS / tokenizer))
    make_model(folder / name, family, vocab_size=vocab_size, tied=True, seed=1, max_positions=1024, **SIZE)
    for file in (TOKENIZERS / tokenizer).iterdir():
        shutil.copy(file, folder / name)
    return {"name": name, "model": str(folder / name), "optimizer": {"lr": 1e-3}}


def test_two_steps_on_real_problems_with_real_tokenizers(tmp_path):
    write_dataset(read_dataset(MATH).problems[:400], tmp_path / "math.jsonl")
    config = {
        "run_dir": str(tmp_path / "run"),
        "num_steps": 2,
        "agents": [agent_table(tmp_path, "gpt", "qwen3", "gpt-2"), agent_table(tmp_path, "phi", "llama", "phi-3")],
        "data": {"files": [str(tmp_path / "math.jsonl")]},
        "reward": {"kind": "math"},
        "algorithm": {"kl_coef": 1e-3, "kl_on": "all"},  # noise earns nothing: without a KL nothing would be trained
        "rollout": {
            "rollouts_per_prompt": 2,
            "max_prompt_tokens": 256,
            "max_answer_tokens": 4,  # of noise a longer answer nearly always holds half a character
            "train_changed_reencodings": True,
        },
        "training": {"prompts_per_step": 8, "prompts_per_update": 4, "max_tokens_per_microbatch": 2048},
    }
    (tmp_path / "run.toml").write_text(tomli_w.dumps(config))
    values = train(tmp_path / "run.toml")[2].values
    for name in ("gpt", "phi"):
        assert values[f"agent/{name}/num_answers"] == 16
        assert values[f"agent/{name}/verdict/no_answer"] > 0.9  # noise has no \boxed answer, and is not an error
        assert values[f"agent/{name}/self/first_ratio_error"] == 0.0
        fates = ("reencoded", "too_long", "undecodable", "unencodable", "control_tokens", "changed")
        fate = {fate: values[f"agent/{name}/view/num_{fate}"] for fate in fates}
        assert fate["reencoded"] + fate["too_long"] > 8, fate
        # noise holds half characters and control tokens, in own answers too: those are counted, and trained on as ids
        assert 16 <= sum(fate.values()) <= 32, fate
    problems = {json.loads(line)["prompt"] for line in (tmp_path / "math.jsonl").read_text().splitlines()}
    assert {prompt["prompt"] for prompt in read_rollouts(tmp_path / "run", 2)} <= problems
