"""The actor with bf16 weights beside float32 main weights, as it trains on CUDA: cases for any device and layout.

jobs/test_actor_bf16.py runs them on the CPU over gloo, gpu/test_actor_gpu.py and gpu/test_two_gpus.py on CUDA.
"""

import dataclasses
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from actor_cases import (
    DESCENT,
    VOCAB,
    Oracle,
    gradient_by_descent,
    make_actor,
    norm,
    objective,
    random_samples,
    relative_error,
)
from tiny_models import make_model

from hacpo_mega.config import OptimizerConfig
from hacpo_mega.records import TokenSequence

BF16 = torch.bfloat16
SIZES = {"hidden_size": 256, "num_heads": 4, "head_dim": 64, "dtype": BF16}
# A bf16 weight keeps 8 bits: a step that leaves nothing of the weights shows the gradient to bf16 precision.
STEP = DESCENT.model_copy(update={"lr": DESCENT.lr * 1e4})


def make_folder(folder: Path, family: str) -> Path:
    """A small model with heads of 64, which the flash kernels take."""
    return make_model(folder, family, **SIZES)


def my_share(samples: list, cell_size: int) -> list:
    """The samples of this rank's cell, whole prompts of them."""
    cell, num_cells = dist.get_rank() // cell_size, dist.get_world_size() // cell_size
    return [sample for sample in samples if sample.prompt_index % num_cells == cell]


Ratios = list[tuple[list[float], list[float]]]


def own_ratios(folder: Path, max_tokens: int, *, tp: int = 1, pp: int = 1, cp: int = 1) -> Ratios:
    """Own ratios that the first and the second update of three steps see, source log-probs being the actor's scores."""
    options = {"tp": tp, "pp": pp, "cp": cp, "max_tokens_per_microbatch": max_tokens, "dtype": BF16}
    actor = make_actor(folder, optimizer=OptimizerConfig(lr=1e-3), **options)
    assert {parameter.dtype for parameter in actor.model.parameters()} == {BF16}
    seen = []
    for step in range(3):
        drawn = my_share(random_samples(8, seed=50 + step), tp * cp * pp)
        own = [sample for sample in drawn if sample.is_self]
        scores = actor.score(own)
        scored = [dataclasses.replace(s, source_logprob=x.mean_logprob) for s, x in zip(own, scores, strict=True)]
        cross = [dataclasses.replace(s, source_logprob=-5.0) for s in drawn if not s.is_self]
        updates = [actor.learn(scored + cross, objective) for _ in range(2)]
        seen.append(tuple([r for report in stats.reports for r in _own(report)] for stats in updates))
    return seen


def _own(report) -> list[float]:
    return report.ratio_B[report.is_self_B].tolist()


def check_own_ratios(seen: Ratios) -> None:
    """1 to the last bit before the policy moves, and something else after."""
    for first, second in seen:
        assert first and first == [1.0] * len(first)
        assert second != first, "the policy did not move, so the test shows nothing"


Found = tuple[dict[str, torch.Tensor], float, float]


def gradient(folder: Path, max_tokens: int, *, tp: int = 1, pp: int = 1, cp: int = 1) -> Found:
    """(gradient by Hugging Face name, loss, norm) of cross-entropy, which has no clip to fall on the other side of."""
    options = {"tp": tp, "pp": pp, "cp": cp, "max_tokens_per_microbatch": max_tokens, "dtype": BF16}
    actor, samples = make_actor(folder, optimizer=STEP, **options), random_samples(6, seed=60)
    num_trained = sum(sample.num_trained for sample in samples)
    mine = my_share(samples, tp * cp * pp)
    found, stats = gradient_by_descent(actor, lambda: actor.learn_supervised(mine, num_trained))
    return {name: tensor / 1e4 for name, tensor in found.items()}, stats.loss, stats.grad_norm


def check_gradient(found: Found, folder: Path) -> None:
    """Hugging Face's in float64 on the same rounded weights, up to bf16."""
    weights, loss, grad_norm = found
    oracle = Oracle(folder)
    exact = oracle.cross_entropy(random_samples(6, seed=60))
    expected = oracle.gradient(exact)
    assert abs(loss / exact.item() - 1) < 5e-3
    assert abs(grad_norm / norm(expected) - 1) < 2e-2
    assert relative_error(weights, expected) < 3e-2


def hugging_faces_error(folder: Path) -> float:
    """Relative error of the same gradient by Hugging Face in bf16, whose logits are rounded, too."""
    (exact, rounded), samples = (Oracle(folder), Oracle(folder, BF16)), random_samples(6, seed=60)
    found, expected = (oracle.gradient(oracle.cross_entropy(samples)) for oracle in (rounded, exact))
    return relative_error({name: tensor.double() for name, tensor in found.items()}, expected)


FREQUENT, LONGEST = 3, 128  # a token, and tokens of a sequence


def frequent_token_error(folder: Path, num_tokens: int, *, tp: int = 1, **options: Any) -> float:
    """Relative error of the row of a token that is half of a micro-batch of so many, in the embedding's gradient.

    A tied head is another sum of the row; it learns to answer alone, and no answer is the token.
    """
    rng = np.random.default_rng(5)
    texts = rng.integers(FREQUENT + 1, VOCAB, size=(num_tokens // LONGEST, LONGEST), dtype=np.int32)
    texts[:, :-1:2] = FREQUENT
    sequences = [TokenSequence(text[:-1], text[-1:], 1) for text in texts]
    options |= {"max_tokens_per_microbatch": 2 * num_tokens, "share_prompts": False, "dtype": BF16}
    actor = make_actor(folder, tp=tp, optimizer=STEP, **options)
    update = partial(actor.learn_supervised, sequences, len(sequences))
    found, stats = gradient_by_descent(actor, update)
    assert stats.num_microbatches == 1
    oracle = Oracle(folder)
    expected = oracle.gradient(oracle.cross_entropy(sequences))
    ours, exact = (rows[name][FREQUENT] for rows in (found, expected) for name in expected if "embed_tokens" in name)
    return float((ours / 1e4 - exact).norm() / exact.norm())
