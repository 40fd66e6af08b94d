"""A live vLLM with experts, given new weights in every way there is, against Hugging Face in float64.

vLLM's own second load of experts on the CPU is wrong, silently or with a RuntimeError
(rollout/weights/expert_weights.py).
"""

import functools
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from job import run_script
from tiny_models import make_model
from transformers import AutoModelForCausalLM

from hacpo_mega.records import Stop

pytestmark = pytest.mark.nightly

EXPERTS = 8
FFN = {
    "qwen3_moe": 48,
    "glm4_moe": 48,
    "mixtral": 128,
}  # over their ranks 24 and 32; the CPU's kernel fills up to multiples of 32
PROJECTIONS = "gate_proj", "up_proj", "down_proj"
NAMES = {"qwen3_moe": PROJECTIONS, "glm4_moe": PROJECTIONS, "mixtral": ("w1", "w3", "w2")}
BLOCKS = {"qwen3_moe": "mlp", "glm4_moe": "mlp", "mixtral": "block_sparse_moe"}
# Its first layer is dense.
SAID = {"glm4_moe": {"n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5, "use_qk_norm": True}}
CASES = [("qwen3_moe", 2), ("glm4_moe", 2), ("mixtral", 4)]
each_case = pytest.mark.parametrize("family, tp", CASES)
# GLM-4.5, whose first layer has no experts, replays no routing.
each_routed = pytest.mark.parametrize("family, tp", [CASES[0], CASES[-1]])


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    for family, ffn in FFN.items():
        for seed, name in enumerate(("first", "other"), 1):
            sizes = {"head_dim": 32, "ffn_size": ffn, "num_experts": EXPERTS, "tied": False, "vocab_size": 256}
            sizes["said"] = SAID.get(family)
            make_model(folder / family / name, family, seed=seed, **sizes)
    return folder


@pytest.fixture(scope="module")
def saw(models, tmp_path_factory) -> Callable[[str, int], list[dict]]:
    @functools.cache
    def visit(family: str, tp: int) -> list[dict]:
        out = tmp_path_factory.mktemp("saw")
        run_script("expert_engine_job", tp, models / family, out, tp)
        return [torch.load(out / f"{rank}.pt", weights_only=False) for rank in range(tp)]

    return visit


@functools.cache
def oracle(folder: Path):
    return AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float64, attn_implementation="eager", experts_implementation="eager"
    )


@torch.no_grad()
def hugging_face(folder: Path) -> list[np.ndarray]:
    """Log-probs of the job's sequences."""
    rng = np.random.default_rng(5)
    sequences = [rng.integers(0, 131, size) for size in (2, 17, 90)]
    found = []
    for sequence in map(torch.as_tensor, sequences):
        table = oracle(folder)(sequence[None]).logits[0, :-1].log_softmax(-1)
        found.append(table.gather(-1, sequence[1:, None])[:, 0].numpy())
    return found


@each_case
def test_an_engine_computes_with_the_weights_that_it_was_given_last(models, saw, family, tp):
    """At the start, after full tensors, after parts, after some of each."""
    for seen in saw(family, tp):
        for name in ("first", "other"):
            right = hugging_face(models / family / name)
            for load in (name, f"{name} again"):
                for found, expected in zip(seen[load], right, strict=True):
                    np.testing.assert_allclose(found, expected, atol=1e-4, rtol=0, err_msg=load)
    first, other = (np.concatenate(hugging_face(models / family / name)) for name in ("first", "other"))
    assert np.abs(first - other).max() > 0.1


@each_case
def test_an_engine_answers_as_hugging_face_does(models, saw, family, tp):
    for seen in saw(family, tp):
        for prompt, answer in zip(np.split(np.random.default_rng(5).integers(0, 131, 2), [2])[:1], seen["answers"]):
            tokens = prompt.tolist()
            for token in answer:
                with torch.no_grad():
                    logits = oracle(models / family / "first")(torch.tensor([tokens])).logits[0, -1]
                assert logits.max() - logits[token] < 1e-3
                tokens.append(int(token))


@each_routed
def test_the_routing_of_an_answer_is_hugging_faces(models, saw, family, tp):
    """Also for prefixes that were in the cache, for what was preempted and what was cut; ties aside."""
    for seen in saw(family, tp):
        for routed in seen["routed"]:
            assert routed["num_preempted"] > 0
            stops = [stop for _, stop, _ in routed["answers"]]
            assert 0 < stops.count(Stop.CUT) <= 2
            for prompt, (answer, stop, found) in zip(routed["prompts"], routed["answers"], strict=True):
                tokens = [*prompt, *answer.tolist()][:-1]
                assert found.shape == (len(tokens), 2, 2) and found.dtype == np.uint8
                num_known = int((found[:, 0, 0] != 255).sum())
                assert num_known == len(tokens) or stop is Stop.CUT
                probs_TLE = router_probs(models / family / "first", tokens)[:num_known]
                best = np.sort(probs_TLE, axis=-1)
                is_clear = best[..., -2] - best[..., -3] > 1e-4
                assert is_clear.mean() > 0.95
                chosen = np.take_along_axis(probs_TLE, found[:num_known].astype(np.int64), axis=-1)
                np.testing.assert_allclose(np.sort(chosen)[is_clear], best[..., -2:][is_clear], rtol=0, atol=1e-12)


@each_routed
def test_vllm_returns_a_routing_on_every_rank(saw, family, tp):
    """Its own side of what the second runner returns, which alone hands it to the first rank."""
    assert [seen["returned"] for seen in saw(family, tp)] == [np.arange(12).reshape(3, 2, 2).tolist()] * tp


@torch.no_grad()
def router_probs(folder: Path, tokens: list[int]) -> np.ndarray:
    """Probabilities of Hugging Face's routers for every token: [T, layers, experts]."""
    model, seen = oracle(folder), []
    hooks = [
        layer.mlp.gate.register_forward_hook(lambda _gate, _given, said: seen.append(said[0].softmax(-1).numpy()))
        for layer in model.model.layers
    ]
    model(torch.tensor([tokens]))
    for hook in hooks:
        hook.remove()
    return np.stack(seen, axis=1)


@each_case
def test_what_an_engine_holds_is_read_back_to_the_bit(saw, family, tp):
    for rank, seen in enumerate(saw(family, tp)):
        wrong = seen["wrong"]
        assert wrong["start"] == wrong["full"] == wrong["parts"] == wrong["both"] == []
        assert wrong["nothing came"] == seen["names"]
        # An expert's last number is of the last rank's part, of gate, up and down alike; a router is on every rank.
        for name, found in seen["flipped"].items():
            assert found == ([name] if rank == tp - 1 or ".gate." in name else []), (rank, name)
        assert len(seen["flipped"]) == 4 + (family in SAID)  # and a bias


@each_case
def test_loaders_of_experts_are_followed_and_cut_the_feed_forward(saw, family, tp):
    gate, up, down = NAMES[family]
    mlp, ffn = BLOCKS[family], FFN[family] // tp
    for rank, seen in enumerate(saw(family, tp)):
        assert seen["left over"] == {}
        low, high = rank * ffn, (rank + 1) * ffn
        expected = {
            f"model.layers.{layer}.{mlp}.experts.*.{name}.weight[0:{EXPERTS}, {rectangle}]"
            for layer in range(family in SAID, 2)
            for name, rectangle in (
                (gate, f"{low}:{high}, 0:64"),
                (up, f"{low}:{high}, 0:64"),
                (down, f"0:64, {low}:{high}"),
            )
        }
        assert {shard for shard in seen["shards"] if ".experts." in shard} == expected, "all of a layer at once"
        assert f"model.layers.1.{mlp}.gate.weight[0:{EXPERTS}, 0:64]" in seen["shards"]
        # A layer is loaded whole.
        assert len(seen["left with it"]) == 3 * EXPERTS
