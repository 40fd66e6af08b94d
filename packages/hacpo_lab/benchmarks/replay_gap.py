"""The effect of router replay on the gap between engine and actor: `python replay_gap.py [SCALE]`.

A bf16 twin on the CPU, where the product computes in float32: a Qwen3-MoE of 6 layers of 32 experts, 4 of a token, with
random weights, routers SCALE (1) times as large. Its engine answers 24 prompts; its actor scores the answers with its
own routing and with the engine's; printed are the metrics that a run has of it.
"""

import sys
import tempfile
from pathlib import Path

import numpy as np
import torch

sys.path.extend(str(Path(__file__).resolve().parents[3] / "tests" / "support" / folder) for folder in ("", "cases"))

from actor_cases import make_actor
from job import TIMEOUT_S, run_script
from safetensors.torch import load_file, save_file
from tiny_models import make_model

from hacpo_mega.cluster.place import Place
from hacpo_mega.cluster.rank_map import AgentShape, RankMap
from hacpo_mega.logbook.files.metrics import Metrics
from hacpo_mega.logbook.steps.step_metrics import add_engine_gap
from hacpo_mega.records import Rollout, Sample, Stop, TokenSequence
from hacpo_mega.rollout.engine import Engine
from hacpo_mega.rollout.vllm.engine_spec import EngineSpec

SIZES = {
    "num_layers": 6, "hidden_size": 256, "num_heads": 8, "num_kv_heads": 4, "head_dim": 32, "ffn_size": 128,
    "num_experts": 32, "experts_per_token": 4, "vocab_size": 512, "tied": False, "dtype": torch.bfloat16,
}  # fmt: skip
ROUTED = {"enable_return_routed_experts": True}
PROMPTS, PROMPT_TOKENS, ANSWER_TOKENS = 24, 24, 96


def main(folder: Path) -> None:
    """On the one rank; what is found goes to a file beside the model."""
    said = []
    rng = np.random.default_rng(1)
    prompts = [rng.integers(512, size=PROMPT_TOKENS) for _ in range(PROMPTS)]
    with Place.join(RankMap(lanes=1, agents=(AgentShape("twin"),)), TIMEOUT_S):
        engine = Engine(EngineSpec(folder, max_model_len=128, dtype=torch.bfloat16, eos_ids=[511], options=ROUTED))
        asked = [prompt.tolist() for prompt in prompts]
        answers = engine.generate(asked, range(PROMPTS), max_tokens=ANSWER_TOKENS, return_logprobs=True)
        engine.close()
        options = {"dtype": torch.bfloat16, "temperature": 1.0, "max_tokens_per_microbatch": 1024}
        actor = make_actor(folder, **options)
        for how in ("own routing", "replayed"):
            sequences = [sequence(*pair, routed=how == "replayed") for pair in zip(prompts, answers, strict=True)]
            rollouts = [Rollout(n, 0, a.token_ids, "", Stop.LENGTH, a.logprobs) for n, a in enumerate(answers)]
            metrics = Metrics("twin", lambda payload: [payload])
            add_engine_gap(metrics, "twin", list(zip(rollouts, actor.score(sequences), strict=True)))
            found = metrics.reduce().values
            said += [how, *(f"  {name} {value:.3g}" for name, value in sorted(found.items()))]
        own = [sample_of(number, sequence) for number, sequence in enumerate(sequences)]
        stats = actor.learn(own, lambda logprob_R, batch: (-logprob_R.sum() * 1e-9, None))
        said.append(f"{sum(len(a.token_ids) for a in answers)} tokens, replay_changed {stats.experts.changed:.3g}")
    (folder / "said").write_text("\n".join(said))


def sequence(prompt: np.ndarray, answer, *, routed: bool) -> TokenSequence:
    routing = answer.routing if routed else None
    return TokenSequence(prompt.astype(np.int32), answer.token_ids, len(answer.token_ids), routing=routing)


def sample_of(number: int, own: TokenSequence) -> Sample:
    rest = {"source": 0, "is_self": True, "prompt_index": number, "rollout_index": 0, "advantage": 0.0}
    return Sample(**vars(own), **rest, source_logprob=0.0, length=float(own.num_trained))


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as made:
        model = make_model(Path(made) / "model", "qwen3_moe", **SIZES)
        weights = load_file(model / "model.safetensors")
        scale = float(sys.argv[1]) if len(sys.argv) > 1 else 1.0
        scaled = {name: tensor * scale if ".gate.weight" in name else tensor for name, tensor in weights.items()}
        save_file(scaled, model / "model.safetensors", metadata={"format": "pt"})
        run_script("replay_gap", 1, model)
        print((model / "said").read_text())
