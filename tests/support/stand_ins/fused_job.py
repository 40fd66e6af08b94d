"""Actors' answers to fused_stand_in.py; imports Megatron, so it must be imported after the stand-ins are in place."""

from collections import Counter
from pathlib import Path
from unittest.mock import patch

import torch
from actor_cases import full_weights, make_actor, one_rank, random_samples

from hacpo_mega.config import OptimizerConfig
from hacpo_mega.megatron.train import optimizer
from hacpo_mega.megatron.train.fused_optimizer import INSTALLED, VERSIONS, chosen_kernels

NAMES = ("torch", "apex", "te")
CLIPPED = 1e-3  # far below the norm of these gradients
UPDATES = 3


def answer(folder: Path, called: Counter[str]) -> None:
    """Writes FOLDER/found.pt: what is there, what "auto" takes, and of each library's optimizer: weights, norms, calls.

    Each is trained for three updates, once stored after two and gone on with by torch's optimizer in another actor.
    """
    found = {"there": list(INSTALLED), "said": VERSIONS, "auto": chosen_kernels("auto", on_cuda=True)}
    with one_rank(), patch.object(optimizer, "chosen_kernels", lambda asked, on_cuda: asked):
        for name in NAMES:
            called.clear()
            found[name] = _trained(folder, name) | {"called": dict(called)}
    torch.save(found, folder / "found.pt")


def _trained(folder: Path, name: str) -> dict:
    actor = _actor(folder, name)
    norms = [update(actor, number) for number in range(UPDATES - 1)]
    state = folder / f"state-{name}"
    state.mkdir()
    counts, write = actor.save(state, copies=False)
    write()
    norms.append(update(actor, UPDATES - 1))
    weights, said = full_weights(actor), actor.optimizer.summary
    other = _actor(folder, "torch")
    other.load(state, **counts)
    update(other, UPDATES - 1)
    return {"weights": weights, "norms": norms, "said": said, "gone on": full_weights(other)}


def _actor(folder: Path, kernels: str):
    config = OptimizerConfig(lr=1e-3, weight_decay=0.1, clip_grad=CLIPPED, kernels=kernels)
    return make_actor(folder / "model", optimizer=config)


def update(actor, number: int) -> float:
    """One update towards what answers are likely by a sum of their log-probs; the norm of its gradient."""
    samples = [sample for sample in random_samples(4, seed=number) if sample.num_trained]
    return actor.learn(samples, lambda logprob_R, batch: (-logprob_R.sum() / 100, None)).grad_norm
