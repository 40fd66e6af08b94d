"""The job of jobs/test_publish.py: Megatron's actor and the live vLLM engine in the same two processes.

`main` on two ranks takes a model and a layout and writes what each
process saw to OUT/<rank>.pt: log-probs of sampled answers by the engine that sampled them and by the actor, after the
first publish, after the publish that follows every optimizer update, and between an update and its publish.
"""

import importlib.metadata
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

import numpy as np
import torch
from job import TIMEOUT_S
from megatron.core import parallel_state
from plan_bytes import moved_bytes

from hacpo_mega.agent.weight_sync import WeightSync
from hacpo_mega.cluster.place import Place
from hacpo_mega.cluster.rank_map import AgentShape, RankMap
from hacpo_mega.config import OptimizerConfig
from hacpo_mega.megatron.actor import Actor, ActorSpec
from hacpo_mega.models.families.architecture import Architecture
from hacpo_mega.models.sharding.layout import Layout
from hacpo_mega.models.sharding.publish_plan import engine_shards
from hacpo_mega.models.sharding.segments import stage_slots
from hacpo_mega.records import TokenSequence
from hacpo_mega.rollout.engine import Engine
from hacpo_mega.rollout.vllm.engine_spec import EngineSpec
from hacpo_mega.rollout.vllm.engine_stream_guard import worker_of
from hacpo_mega.rollout.vllm.row_noise import answer_seed

NUM_UPDATES = 2
MAX_MODEL_LEN = 192
MAX_TOKENS = 12  # more than a window's 11: a step of the engine costs as much as all its other work
LOOKED_AT = "model.embed_tokens.weight"
CACHE_BYTES = 16 * 2**20
# A load of all weights shows the changes in every so many-th tensor: none beside another of its layer.
NUM_GROUPS = 7
# Longer than a block of vLLM's prefix cache (128 tokens) and shorter.
PROMPT_LENGTHS = (150, 3, 9, 9, 20, 1)


def build_actor(folder: Path, tp: int, pp: int) -> Actor:
    ep = tp if Architecture.from_folder(folder).has_experts else 1
    spec = ActorSpec(
        layout=Layout(tp, pp, ep=ep),
        optimizer=OptimizerConfig(lr=3e-3),
        total_updates=NUM_UPDATES,
        max_tokens_per_microbatch=256,
        max_positions=MAX_MODEL_LEN,
    )
    return Actor(folder, spec)


def answer(engine: Engine, step: int, cell: int) -> tuple[list[TokenSequence], list[np.ndarray]]:
    """Sampled answers of this cell, as sequences to score, and the log-probs they were drawn with."""
    rng = np.random.default_rng(cell)
    prompts = [rng.integers(0, 131, size).tolist() for size in PROMPT_LENGTHS]
    seeds = [answer_seed(1, step, index, 0, cell) for index in range(len(prompts))]
    completions = engine.generate(prompts, seeds, max_tokens=MAX_TOKENS, return_logprobs=True)
    samples = [as_sequence(prompt, completion.token_ids) for prompt, completion in zip(prompts, completions)]
    return samples, [completion.logprobs for completion in completions]


def as_sequence(prompt: list[int], answer_ids: np.ndarray) -> TokenSequence:
    return TokenSequence(np.array(prompt, dtype=np.int32), answer_ids, num_trained=len(answer_ids))


def train_beside_engine(place: Place, folder: Path, tp: int, pp: int, engine_tp: int) -> dict:
    """Publish, sample and learn in turn."""
    cell = place.coordinate.cell
    actor = build_actor(folder, tp, pp)
    spec = EngineSpec(
        folder,
        max_model_len=MAX_MODEL_LEN,
        dtype=torch.float32,
        tensor_parallel_size=engine_tp,
        eos_ids=[7],
        random_weights=True,
        options={"kv_cache_memory_bytes": CACHE_BYTES},
    )
    engine = Engine(spec)
    weight_sync = WeightSync(place, actor, engine)
    seen = {
        "sampled": [],
        "scored": [],
        "stale": [],
        "fixed": [],
        "samples": [],
        "differences": [],
        "others differ": [],
    }
    fixed = [as_sequence([5, 6, 7], np.arange(8, 40, dtype=np.int32))]
    for step in range(NUM_UPDATES + 1):
        weight_sync.publish()
        seen["differences"].append(weight_sync.differences())
        samples, sampled = answer(engine, step, cell)
        seen["samples"].append(samples)
        seen["sampled"].append(sampled)
        seen["scored"].append(actor.token_logprobs(samples))
        seen["fixed"].append(actor.token_logprobs(fixed)[0])
        if step < NUM_UPDATES:
            actor.learn_supervised(samples, num_trained_tokens=100)
            seen["stale"].append(actor.token_logprobs(samples))  # the engine that sampled them knows of no update
    actor.learn_supervised(samples, num_trained_tokens=100)
    seen["behind"] = weight_sync.differences()
    # As if the output layer had no packed copy on the CPU: it stays as it was.
    packed, weight_sync._parts._packed = weight_sync._parts._packed, {}
    weight_sync.publish()
    weight_sync._parts._packed = packed
    seen["stale head"] = weight_sync.differences()
    names = [name for name, _ in actor.weights()]
    slots = stage_slots(actor.architecture, (actor.architecture.num_layers,), 0)
    engine_rank = place.coordinate.engine_rank
    by_arithmetic = engine_shards(slots, actor.architecture, tp=engine_tp, rank=engine_rank)
    seen["shards"] = [set(map(str, shards)) for shards in ((p.shard for p in weight_sync._parts.parts), by_arithmetic)]
    seen["left over"] = weight_sync.fallback
    seen["mutated"] = {}
    for first in range(NUM_GROUPS):
        victims = names[first::NUM_GROUPS]
        lines = differences_after_mutation(engine, actor, weight_sync, victims)
        seen["mutated"] |= {name: [line for line in lines if line.startswith(f"{name}: ")] for name in victims}
        seen["others differ"] += [line for line in lines if line.partition(": ")[0] not in victims]
    seen["followed in part"] = publish_in_part(place, engine, actor)
    engine.close()
    parallel_state.destroy_model_parallel()
    return seen


def publish_in_part(place: Place, engine: Engine, actor: Actor) -> dict:
    """With loaders of which two do more with a tensor than to cut it: one on every rank, and one on rank 1 alone."""
    with engine._guard.open() as llm:
        model = worker_of(llm).get_model()
    original = model.load_weights

    def load_weights(weights):
        for name, tensor in weights:
            if name.startswith("model.layers.1.mlp.") and "up_proj" in name:
                tensor = tensor * 1
            if name == LOOKED_AT and place.coordinate.agent_rank == 1:
                assert tensor.isfinite().all().item()
            original([(name, tensor)])

    model.load_weights = load_weights
    weight_sync = WeightSync(place, actor, engine)
    zeros = [torch.zeros_like(tensor) for _, tensor in actor.weights()]
    engine.load(zip([name for name, _ in actor.weights()], zeros))
    behind = weight_sync.differences()
    place.spans.take_sent()
    weight_sync.publish()
    sent = sum(size for (_, whom), size in place.spans.take_sent().items() if whom == "cell")
    del model.load_weights
    with patch.object(importlib.metadata, "version", lambda name: f"9 of {name}"):
        said_of_another = weight_sync.summary
    return {
        "left over": weight_sync.fallback, "said": weight_sync.summary, "behind": behind,
        "said of another": said_of_another,
        "differences": weight_sync.differences(), "sent": sent,
        "planned": moved_bytes(weight_sync.plan).sent[place.coordinate.cell_rank],
    }  # fmt: skip


def differences_after_mutation(engine: Engine, actor: Actor, weight_sync: WeightSync, victims: list[str]) -> list[str]:
    """Differences found in engines of which those on rank 1 were given these tensors with another last bit each."""

    def weights() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in actor.weights():
            if name in victims and torch.distributed.get_rank() == 1:
                tensor.view(-1)[-1:].view(torch.int32).bitwise_xor_(1)
            yield name, tensor

    engine.load(weights())
    return weight_sync.differences()


def train_alone(folder: Path, tp: int, pp: int, samples_of_steps: list[list[TokenSequence]]) -> np.ndarray:
    """The same updates without an engine in the process group's life: the last scores of the last samples."""
    actor = build_actor(folder, tp, pp)
    for samples in samples_of_steps[:-1]:
        actor.learn_supervised(samples, num_trained_tokens=100)
    scores = actor.token_logprobs(samples_of_steps[-1])
    parallel_state.destroy_model_parallel()
    return scores


def main(folder: Path, out: Path, tp: int, pp: int, engine_tp: int) -> None:
    shape = AgentShape("both", tp=tp, pp=pp, engine_tp=engine_tp if tp * pp > 1 else 1)
    with Place.join(RankMap(lanes=2 // (tp * pp), agents=(shape,)), TIMEOUT_S) as place:
        rank = place.coordinate.agent_rank
        seen = train_beside_engine(place, folder, tp, pp, engine_tp)
        if tp == pp == 1:
            seen["alone"] = train_alone(folder, tp, pp, seen["samples"])
        torch.save(seen, out / f"{rank}.pt")
