"""Shared parts of the actor's tests: samples, a Hugging Face oracle that computes by itself, and ways to look inside.

The oracle runs one sequence at a time in float64 with eager attention and writes the objective out again from the
paper; nothing of hacpo_mega or its kernels takes part.
"""

import dataclasses
import gc
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from safetensors.torch import load_file
from tiny_models import reference_model
from torch.utils._pytree import tree_map_only

from hacpo_mega.agent.policy_loss import PolicyLoss
from hacpo_mega.config import AlgorithmConfig, OptimizerConfig
from hacpo_mega.megatron.actor import Actor, ActorHooks, ActorSpec
from hacpo_mega.models.sharding.layout import Layout
from hacpo_mega.records import MicroBatch, Sample

VOCAB = 131
TEMPERATURE = 0.8
ALGORITHM = AlgorithmConfig(alpha=1.5, delta=0.3, delta_step=0.05)
UPDATE_INDEX = 1  # lower end of the cross band: 1 - 0.3 + 0.05 = 0.75
WEIGHT = 1 / 7

# Allowed float32 error, relative to the sum of absolute terms. From an embedding to a log-prob a number meets about
# 1260 roundings (in each of two layers sums over 64, 64, 16, 30, 30, 64, 64, 64 and 96 terms, then over 64, 64 and 131)
# of at most 2^-24 each; processors order and fuse them differently, so they count as independent: four standard
# deviations of their sum. As many again on the way back.
ROUNDING = 4 * math.sqrt(1260) * 2.0**-24
LOGPROB_ERROR = ROUNDING * math.log(VOCAB)
GRADIENT_ERROR = 2 * ROUNDING

# Adam whose first step is plain gradient descent: lr / (|g| + eps) with eps this large is GRADIENT_RATE for every g.
GRADIENT_RATE = 100.0
# No configuration may say such a rate, so it is not asked.
DESCENT = OptimizerConfig.model_construct(lr=GRADIENT_RATE * 1e8, eps=1e8, clip_grad=1e30)


def random_samples(num_prompts: int, seed: int) -> list[Sample]:
    """Three sources of two answers each to every prompt; source 0 is the learner. Some train nothing, some no EOS."""
    rng = np.random.default_rng(seed)
    samples = []
    for prompt in range(num_prompts):
        prompt_ids = rng.integers(VOCAB, size=rng.integers(1, 9), dtype=np.int32)
        for source in range(3):
            for rollout in range(2):
                answer_ids = rng.integers(VOCAB, size=rng.integers(2, 20), dtype=np.int32)
                num_trained = int(rng.choice([0, len(answer_ids) - 1, len(answer_ids)], p=[0.1, 0.3, 0.6]))
                advantage = float(rng.normal())
                samples.append(
                    Sample(
                        source=source,
                        is_self=source == 0,
                        prompt_index=prompt,
                        rollout_index=rollout,
                        prompt_ids=prompt_ids,
                        answer_ids=answer_ids,
                        num_trained=num_trained,
                        advantage=advantage,
                        source_logprob=0.0,
                        length=float(num_trained),
                    )
                )
    return samples


def with_sources_near(samples: Sequence[Sample], means: Sequence[float], seed: int) -> list[Sample]:
    """Source log-probs that put ratios well inside and well outside every clip, and no ratio on a border."""
    rng = np.random.default_rng(seed)
    return [
        dataclasses.replace(s, source_logprob=float(np.float32(mean - np.log(rng.choice(_RATIOS[s.is_self])))))
        for s, mean in zip(samples, means, strict=True)
    ]


_RATIOS = {True: [0.99, 1.0001, 1.01], False: [0.5, 0.8, 0.95, 1.3]}


class Oracle:
    """A Hugging Face model in float64, or another type."""

    def __init__(self, folder: Path, dtype: torch.dtype = torch.float64) -> None:
        self.model = reference_model(folder, dtype)

    def token_logprobs(self, sample: Sample) -> torch.Tensor:
        """Log-probs of the trained tokens of one sample, with a graph."""
        tokens = torch.from_numpy(np.concatenate([sample.prompt_ids, sample.answer_ids])).long()
        logits_TV = self.model(tokens[None]).logits[0] / TEMPERATURE
        first = len(sample.prompt_ids)
        rows = logits_TV[first - 1 : first - 1 + sample.num_trained].log_softmax(dim=-1)
        return rows.gather(1, tokens[first : first + sample.num_trained, None])[:, 0]

    def mean_logprobs(self, samples: Sequence[Sample]) -> list[float]:
        with torch.no_grad():
            return [float(self.token_logprobs(s).sum()) / max(s.num_trained, 1) for s in samples]

    def policy_loss(self, samples: Sequence[Sample]) -> torch.Tensor:
        """HACPO, eq. 47 (own) and eq. 50 (cross), written out."""
        return sum(self.policy_terms(samples), start=torch.zeros((), dtype=torch.float64))

    def policy_loss_error(self, samples: Sequence[Sample]) -> float:
        """The error that float32 may make: terms cancel in the loss, their errors do not.

        A term is proportional to exp((1 + alpha) * mean log-prob) at most, and carries that exponent's error.
        """
        with torch.no_grad():
            size = sum(abs(float(term)) for term in self.policy_terms(samples))
        return size * (ROUNDING + (1 + ALGORITHM.alpha) * LOGPROB_ERROR)

    def policy_terms(self, samples: Sequence[Sample]) -> Iterator[torch.Tensor]:
        for sample in samples:
            if sample.num_trained == 0:
                continue
            ratio = (self.token_logprobs(sample).mean() - sample.source_logprob).exp()
            if sample.is_self:
                clipped = ratio.clamp(1 - ALGORITHM.eps_low, 1 + ALGORITHM.eps_high)
                loss = -torch.min(ratio * sample.advantage, clipped * sample.advantage)
            else:
                band = ratio.clamp(1 - ALGORITHM.delta + UPDATE_INDEX * ALGORITHM.delta_step, 1.0)
                loss = -band * band.detach() ** ALGORITHM.alpha * sample.advantage
            yield WEIGHT * loss

    def cross_entropy(self, samples: Sequence[Sample]) -> torch.Tensor:
        """Mean over all trained tokens of all samples."""
        logprobs = torch.cat([self.token_logprobs(sample) for sample in samples])
        return -logprobs.mean()

    def gradient(self, loss: torch.Tensor) -> dict[str, torch.Tensor]:
        """d loss / d parameter by Hugging Face name; a tied head is part of the embedding, once."""
        self.model.zero_grad()
        loss.backward()
        return {name: parameter.grad for name, parameter in self.model.named_parameters()}

    def stored_gradient(self, loss: torch.Tensor, folder: Path) -> dict[str, torch.Tensor]:
        """The same by the names that a folder has, where experts are apart: it is saved in the weights' place."""
        self.gradient(loss)
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.copy_(parameter.grad)
        self.model.save_pretrained(folder)
        return load_file(folder / "model.safetensors")


def objective(token_logprob_R: torch.Tensor, batch: MicroBatch):
    """The project's own objective as a loss function of an actor."""
    loss, report = PolicyLoss(UPDATE_INDEX, WEIGHT, ALGORITHM, reference={})(token_logprob_R, batch)
    return loss, report.terms


@contextmanager
def one_rank(backend: str = "gloo") -> Iterator[None]:
    """This process as an agent of one rank; nothing of Megatron's groups is left to the next test module."""
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


def make_actor(
    folder: Path,
    *,
    tp: int = 1,
    pp: int = 1,
    cp: int = 1,
    ep: int = 1,
    optimizer: OptimizerConfig = DESCENT,
    **options,
) -> Actor:
    """An actor in the present default group, whatever layout an earlier one of this process had, which is over."""
    end_model_parallel()
    options = {"total_updates": 10, "max_tokens_per_microbatch": 60, "temperature": TEMPERATURE, **options}
    hooks = ActorHooks(**{hook.name: options.pop(hook.name) for hook in fields(ActorHooks) if hook.name in options})
    return Actor(folder, ActorSpec(layout=Layout(tp, pp, cp=cp, ep=ep), optimizer=optimizer, **options), hooks)


def end_model_parallel() -> None:
    """Forgets Megatron's groups and ends them. Collective over the default group.

    Each has a thread of gloo that wakes a hundred times a second: those of some dozen actors stall a machine. An ended
    group keeps it until the last actor that knows the group is collected.
    """
    parallel_state.destroy_model_parallel()
    gc.collect()
    dist.barrier()  # nobody speaks in them any more
    for group in list(dist.distributed_c10d._world.pg_map):
        if group is not dist.group.WORLD:
            dist.destroy_process_group(group)


def full_weights(actor: Actor) -> dict[str, torch.Tensor]:
    return {name: tensor.to("cpu", copy=True) for name, tensor in actor.weights()}


def gradient_by_descent(actor: Actor, update) -> tuple[dict[str, torch.Tensor], object]:
    """The gradient that `update()` applied to an actor made with DESCENT, read off its weights, and its answer."""
    before = full_weights(actor)
    stats = update()
    after = full_weights(actor)
    # Columns of a report share one buffer of bytes, which torch.save refuses.
    stats = dataclasses.replace(stats, reports=tree_map_only(torch.Tensor, torch.clone, stats.reports))
    return {name: (before[name].double() - after[name].double()) / GRADIENT_RATE for name in before}, stats


def relative_error(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """|found - expected| / |expected| over the whole model, as one vector."""
    assert found.keys() == expected.keys(), found.keys() ^ expected.keys()
    difference = sum(float((found[name] - expected[name]).square().sum()) for name in expected)
    return (difference / sum(float(expected[name].square().sum()) for name in expected)) ** 0.5


def norm(gradient: dict[str, torch.Tensor]) -> float:
    return sum(float(tensor.square().sum()) for tensor in gradient.values()) ** 0.5
