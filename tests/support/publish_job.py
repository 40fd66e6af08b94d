"""What jobs/test_publish.py runs: Megatron's actor and the live vLLM engine in the same two processes.

`main` on two ranks takes a model and a layout and writes what each
process saw to OUT/<rank>.pt: log-probs of sampled answers by the engine that sampled them and by the actor, after the
first publish, after the publish that follows every optimizer update, and between an update and its publish.
"""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from job import TIMEOUT_S
from megatron.core import parallel_state

from hacpo_mega.cluster.place import Place
from hacpo_mega.cluster.rank_map import AgentShape, RankMap
from hacpo_mega.config import OptimizerConfig
from hacpo_mega.megatron.actor import Actor
from hacpo_mega.records import TokenSequence
from hacpo_mega.rollout.engine import Engine
from hacpo_mega.rollout.row_noise import answer_seed

NUM_UPDATES = 3
MAX_MODEL_LEN = 192
# Longer than a block of vLLM's prefix cache (128 tokens) and shorter.
PROMPT_LENGTHS = (150, 3, 9, 9, 20, 1)


def build_actor(folder: Path, tp: int, pp: int) -> Actor:
    return Actor(
        folder,
        tp=tp,
        pp=pp,
        optimizer=OptimizerConfig(lr=3e-3),
        total_updates=NUM_UPDATES,
        max_tokens_per_microbatch=256,
        max_positions=MAX_MODEL_LEN,
    )


def answer(engine: Engine, step: int, cell: int) -> tuple[list[TokenSequence], list[np.ndarray]]:
    """Sampled answers of this cell, as sequences to score, and the log-probs they were drawn with."""
    rng = np.random.default_rng(cell)
    prompts = [rng.integers(0, 131, size).tolist() for size in PROMPT_LENGTHS]
    seeds = [answer_seed(1, step, index, 0, cell) for index in range(len(prompts))]
    completions = engine.generate(prompts, seeds, max_tokens=30, return_logprobs=True)
    samples = [as_sequence(prompt, completion.token_ids) for prompt, completion in zip(prompts, completions)]
    return samples, [completion.logprobs for completion in completions]


def as_sequence(prompt: list[int], answer_ids: np.ndarray) -> TokenSequence:
    return TokenSequence(np.array(prompt, dtype=np.int32), answer_ids, num_trained=len(answer_ids))


def train_beside_engine(folder: Path, tp: int, pp: int, engine_tp: int, cell: int) -> dict:
    """Publish, sample and learn in turn."""
    actor = build_actor(folder, tp, pp)
    engine = Engine(
        folder,
        max_model_len=MAX_MODEL_LEN,
        dtype=torch.float32,
        tensor_parallel_size=engine_tp,
        eos_ids=[7],
        random_weights=True,
    )
    seen = {"sampled": [], "scored": [], "stale": [], "fixed": [], "samples": [], "differences": []}
    fixed = [as_sequence([5, 6, 7], np.arange(8, 40, dtype=np.int32))]
    for step in range(NUM_UPDATES + 1):
        engine.load(actor.weights())
        seen["differences"].append(engine.differences(actor.weights()))
        samples, sampled = answer(engine, step, cell)
        seen["samples"].append(samples)
        seen["sampled"].append(sampled)
        seen["scored"].append(actor.token_logprobs(samples))
        seen["fixed"].append(actor.token_logprobs(fixed)[0])
        if step < NUM_UPDATES:
            actor.learn_supervised(samples, num_trained_tokens=100)
            seen["stale"].append(actor.token_logprobs(samples))  # the engine that sampled them knows of no update
    actor.learn_supervised(samples, num_trained_tokens=100)
    seen["behind"] = engine.differences(actor.weights())
    # As vLLM alone would load a tied model on the CPU: the packed output layer stays as it was.
    engine._has_tied_embeddings, is_tied = False, engine._has_tied_embeddings
    engine.load(actor.weights())
    engine._has_tied_embeddings = is_tied
    seen["stale head"] = engine.differences(actor.weights())
    names = [name for name, _ in actor.weights()]
    seen["mutated"] = {name: differences_after_mutation(engine, actor, name) for name in names}
    engine.close()
    parallel_state.destroy_model_parallel()
    return seen


def differences_after_mutation(engine: Engine, actor: Actor, victim: str) -> list[str]:
    """What is found in engines of which those on rank 1 were given one tensor with another last number."""

    def weights() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in actor.weights():
            if name == victim and torch.distributed.get_rank() == 1:
                tensor.view(-1)[-1].mul_(1 + 2**-20).add_(2**-30)
            yield name, tensor

    engine.load(weights())
    return engine.differences(actor.weights())


def train_alone(folder: Path, tp: int, pp: int, samples_of_steps: list[list[TokenSequence]]) -> np.ndarray:
    """The same updates without an engine in the process group's life: the last scores of the last samples."""
    actor = build_actor(folder, tp, pp)
    for samples in samples_of_steps[:-1]:
        actor.learn_supervised(samples, num_trained_tokens=100)
    scores = actor.token_logprobs(samples_of_steps[-1])
    parallel_state.destroy_model_parallel()
    return scores


def main(folder: Path, out: Path, tp: int, pp: int, engine_tp: int) -> None:
    with Place.join(RankMap(lanes=1, agents=(AgentShape("both", tp=2),)), TIMEOUT_S) as place:
        rank = place.coordinate.agent_rank
        seen = train_beside_engine(folder, tp, pp, engine_tp, cell=rank // (tp * pp))
        if tp == pp == 1:
            seen["alone"] = train_alone(folder, tp, pp, seen["samples"])
        torch.save(seen, out / f"{rank}.pt")
