"""The job of jobs/test_expert_engine.py: a live vLLM with experts, which is given new weights in every way there is.

Every process writes what it saw of a model to OUT/<rank>.pt: log-probs after each load, what the engine held, and what
its loaders did.
"""

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
import torch.distributed as dist
from job import TIMEOUT_S
from safetensors.torch import load_file
from vllm.distributed.aux_output_connector.connector import AuxOutputConnectorMetadata
from vllm.distributed.aux_output_connector.worker import AuxOutputWorkerConnector

from hacpo_mega.cluster.place import Place
from hacpo_mega.cluster.rank_map import AgentShape, RankMap
from hacpo_mega.models.sharding.shards import Shard, stacked_shapes
from hacpo_mega.rollout.engine import Engine
from hacpo_mega.rollout.vllm.engine_spec import EngineSpec
from hacpo_mega.rollout.vllm.engine_stream_guard import worker_of

Weights = dict[str, torch.Tensor]
# A cache that does not hold all of the six answers of `routed` to their ends.
CROWDED = {"block_size": 32, "num_gpu_blocks_override": 11, "enable_return_routed_experts": True}


def sequences() -> list[list[int]]:
    rng = np.random.default_rng(5)
    return [rng.integers(0, 131, size).tolist() for size in (2, 17, 90)]


def visit(models: Path, tp: int) -> dict:
    """The folder's weights, another's by full tensors, the first ones by parts, others by parts and full tensors."""
    folder, other = models / "first", load_file(models / "other" / "model.safetensors")
    first = load_file(folder / "model.safetensors")
    asked = {"max_model_len": 128, "tensor_parallel_size": tp, "eos_ids": [7]}
    engine = Engine(EngineSpec(folder, dtype=torch.float32, options=CROWDED, **asked))
    seen = {"first": engine.logprobs(sequences()), "wrong": {"start": differing(engine, first)}}
    engine.load(other.items())
    seen["other"], seen["wrong"]["full"] = engine.logprobs(sequences()), differing(engine, other)
    parts = engine.weights({name: tuple(tensor.shape) for name, tensor in first.items()})
    seen["left over"], seen["shards"] = dict(parts.fallback), sorted(str(part.shard) for part in parts.parts)
    seen["wrong"]["nothing came"] = differing(engine, first)
    by_parts(engine, parts, first)
    seen["first again"], seen["wrong"]["parts"] = engine.logprobs(sequences()), differing(engine, first)
    seen["answers"] = [
        answer.token_ids for answer in engine.generate(sequences(), [3, 4, 5], max_tokens=9, temperature=0.0)
    ]
    seen["routed"] = [routed(engine) for _ in range(2)]  # the second time prompts are in the cache
    expert = next(name for name in first if "experts.0." in name)
    parts.use_fallback({expert: "asked for"})
    seen["left with it"] = sorted(parts.fallback)
    by_parts(engine, parts, other)
    seen["other again"], seen["wrong"]["both"] = engine.logprobs(sequences()), differing(engine, other)
    looked_at = [name for name in first if ".layers.1." in name and (".experts.0." in name or ".gate." in name)]
    seen["flipped"] = {name: flipped(engine, first, name) for name in looked_at}
    seen["names"], seen["returned"] = sorted(first), returned(engine)
    engine.close()
    return seen


def routed(engine: Engine) -> dict:
    """Sampled answers to prompts that begin alike, of which some are preempted and some cut, with their routing."""
    ended: list[int] = []
    prompts = [sequences()[2][:size] for size in (70, 70, 50, 3, 40, 60)]
    with engine._guard.open() as llm:
        scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    preempt, preempted = scheduler._preempt_request, []

    def noted(request, *how, **options):
        preempted.append(request)
        return preempt(request, *how, **options)

    scheduler._preempt_request = noted
    answers = engine.generate(
        prompts, range(6), max_tokens=30, temperature=1.0, return_logprobs=True,
        on_answer=lambda place, answer: ended.append(place), is_unwanted=lambda: len(ended) >= 4,
    )  # fmt: skip
    scheduler._preempt_request = preempt
    told = [(answer.token_ids, answer.stop, answer.routing) for answer in answers]
    return {"prompts": prompts, "answers": told, "num_preempted": len(preempted)}


def returned(engine: Engine) -> list:
    """The output of vLLM's second runner for this rank after a step that read three tokens of a prompt."""
    with engine._guard.open() as llm:
        config, runner = llm.llm_engine.vllm_config, worker_of(llm).model_runner
        connector = AuxOutputWorkerConnector(
            vllm_config=config, model=runner.get_model(), kv_cache_config=runner.kv_cache_config
        )
        connector._capturer.device_buffer[:3] = torch.arange(12).reshape(3, 2, 2)
        connector.begin_step(AuxOutputConnectorMetadata(0, {"a": 0}, {}, ()))
        pending = connector.prepare_output(
            SimpleNamespace(
                req_ids=["a"], query_start_loc_np=np.array([0, 3]), num_computed_tokens_np=np.array([0])
            )
        )  # fmt: skip
        pending.enqueue_cpu_copy(np.array([1]), np.array([0]))
        rows = connector.process_output(pending)["a"].rows.tolist()
        connector.close()
    return rows


def by_parts(engine: Engine, parts, full: Weights) -> None:
    with engine.receiving(parts) as receiver:
        for number, part in enumerate(parts.parts):
            receiver.view(number, part.shard, torch.float32).copy_(cut(full, part.shard))
            receiver.wrote(number, part.shard.size)
        receiver.load((name, full[name]) for name in parts.fallback)


def cut(full: Weights, shard: Shard) -> torch.Tensor:
    members = [shard.member(number) for number in range(shard.num_members)]
    cuts = [
        full[one.name][tuple(slice(start, start + size) for start, size in zip(one.offsets, one.sizes))]
        for one in members
    ]
    return cuts[0] if members == [shard] else torch.stack(cuts)


def differing(engine: Engine, full: Weights) -> list[str]:
    """Tensors of which the engine does not hold the bits that it should, and those that it does not hold at all."""
    shapes, right = stacked_shapes({name: tuple(tensor.shape) for name, tensor in full.items()}), set()
    with engine.held() as held:
        for part in held:
            shard = part.shard(shapes[part.name])
            rows = (tensor.reshape(shard.num_members, -1) for tensor in (part.view(shard), cut(full, shard)))
            alike = map(torch.equal, *rows)
            right |= {shard.member(number).name for number, is_alike in enumerate(alike) if is_alike}
    return sorted(full.keys() - right)


def flipped(engine: Engine, full: Weights, victim: str) -> list[str]:
    """Differences where the engine was given one tensor with another last bit."""

    def weights() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in full.items():
            tensor = tensor.clone()
            if name == victim:
                tensor.view(-1)[-1:].view(torch.int32).bitwise_xor_(1)
            yield name, tensor

    engine.load(weights())
    return differing(engine, full)


def main(models: Path, out: Path, tp: int) -> None:
    shape = AgentShape("experts", tp=tp, engine_tp=tp)
    with Place.join(RankMap(lanes=1, agents=(shape,)), TIMEOUT_S):
        torch.save(visit(models, tp), out / f"{dist.get_rank()}.pt")
