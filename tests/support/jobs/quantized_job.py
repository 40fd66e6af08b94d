"""The job of jobs/test_publish_quantized.py: a bf16 actor and a live vLLM that quantizes, in the same two processes.

The engine's expected tensors are worked out here from full ones by the definition of an fp8 matrix with a scale for
each row (448 is the largest finite number of float8_e4m3fn), and cut for the engine's rank.
"""

from functools import partial
from pathlib import Path

import numpy as np
import torch
from job import TIMEOUT_S
from megatron.core import parallel_state
from plan_bytes import moved_bytes
from publish_job import MAX_MODEL_LEN, answer, as_sequence
from vllm.config.quantization import ONLINE_QUANT_SHORTHAND_NAMES
from vllm.model_executor.layers.quantization import QUANTIZATION_METHODS, get_quantization_config

from hacpo_mega.agent import weight_sync as publication_module
from hacpo_mega.agent.weight_sync import WeightSync
from hacpo_mega.cluster.place import Place
from hacpo_mega.cluster.rank_map import AgentShape, RankMap
from hacpo_mega.config import OptimizerConfig
from hacpo_mega.megatron.actor import Actor, ActorSpec
from hacpo_mega.models.sharding.layout import Layout
from hacpo_mega.models.sharding.publish_plan import publish_plan
from hacpo_mega.rollout.engine import Engine
from hacpo_mega.rollout.vllm.engine_spec import EngineSpec
from hacpo_mega.rollout.vllm.engine_stream_guard import worker_of

LARGEST = 448.0
LEARNT = [as_sequence([5, 6, 7], np.arange(8, 108, dtype=np.int32))]
FUSED = {
    "self_attn.qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "self_attn.o_proj": ("self_attn.o_proj",),
    "mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj"),
    "mlp.down_proj": ("mlp.down_proj",),
}


def by_definition(full: dict[str, torch.Tensor], layer: int, name: str, tp: int, rank: int) -> dict[str, torch.Tensor]:
    """Weight [in, out] and scale [out, 1] of a fused matrix at a rank of an engine."""
    cut_rows = len(FUSED[name]) > 1
    parts = [full[f"model.layers.{layer}.{part}.weight"].double() for part in FUSED[name]]
    scales = [(part.abs().amax(1, keepdim=True) / LARGEST).clamp_min(1 / (LARGEST * 512)).float() for part in parts]
    if cut_rows:
        parts, scales = ([tensor.chunk(tp)[rank] for tensor in tensors] for tensors in (parts, scales))
    else:
        parts = [part.chunk(tp, dim=1)[rank] for part in parts]
    weight, scale = torch.cat(parts), torch.cat(scales)
    numbers = (weight.float() / scale).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn)
    return {"weight": numbers.T, "weight_scale": scale}


def differing(engine: Engine, full: dict[str, torch.Tensor], tp: int, rank: int) -> list[str]:
    """Tensors of the engine that are not, in every bit, what they are by definition."""
    found = []
    with engine._guard.open() as llm:
        held = dict(worker_of(llm).get_model().named_parameters())
    for layer in range(2):
        for name in FUSED:
            for kind, tensor in by_definition(full, layer, name, tp, rank).items():
                own = held[f"model.layers.{layer}.{name}.{kind}"]
                if own.dtype != tensor.dtype or not torch.equal(own.contiguous().view(torch.uint8),
                                                                tensor.contiguous().view(torch.uint8)):  # fmt: skip
                    found.append(f"{layer}.{name}.{kind}")
    return found


def flip_a_bit(engine: Engine) -> str:
    """In the last scale of the model, whose name is returned."""
    with engine._guard.open() as llm, torch.inference_mode():
        scales = [(n, t) for n, t in worker_of(llm).get_model().named_parameters() if "weight_scale" in n]
        name, tensor = scales[-1]
        tensor.view(torch.uint8).view(-1)[-1:].bitwise_xor_(1)
    return name


def of_quantized_folders() -> set[str]:
    """Kinds of which vLLM makes nothing without what a folder says of itself."""
    found = set()
    for kind in set(QUANTIZATION_METHODS) - set(ONLINE_QUANT_SHORTHAND_NAMES):
        made = get_quantization_config(kind)
        try:
            made()
        except TypeError:
            found.add(kind)
        if made.get_config_filenames():
            found.add(kind)
    return found


def main(folder: Path, out: Path, quantization: str, tp: int, pp: int, engine_tp: int, rollout: int) -> None:
    """Writes what this rank saw to OUT/<rank>.pt; `rollout` ranks only answer, behind those that train, if any."""
    shape = AgentShape("one", tp=tp, pp=pp, engine_tp=engine_tp, rollout=rollout)
    with Place.join(RankMap(1, (shape,)), TIMEOUT_S) as place:
        rank, actor, engine = place.coordinate.engine_rank, None, None
        if place.trains:
            spec = ActorSpec(
                layout=Layout(tp=tp, pp=pp), optimizer=OptimizerConfig(lr=3e-3), total_updates=3,
                max_tokens_per_microbatch=256, max_positions=MAX_MODEL_LEN, dtype=torch.bfloat16,
            )  # fmt: skip
            actor = Actor(folder, spec)
        if place.coordinate.answers:
            spec = EngineSpec(
                folder, max_model_len=MAX_MODEL_LEN, dtype=torch.bfloat16, tensor_parallel_size=engine_tp, eos_ids=[7],
                random_weights=True, options={"quantization": quantization, "kv_cache_memory_bytes": 64 << 20},
            )  # fmt: skip
            engine = Engine(spec)
        # Small buckets: a layer's tensors come in several.
        publication_module.publish_plan = partial(publish_plan, bucket_bytes=8_192)
        weight_sync = WeightSync(place, actor, engine)
        seen = {"left over": weight_sync.fallback, "differing": [], "differences": [], "gaps": []}
        seen["of quantized folders"] = of_quantized_folders()
        seen["buckets"] = len(weight_sync.plan.buckets)
        for step in range(2):
            if actor is not None:
                full = {name: tensor.clone() for name, tensor in actor.weights()}
                torch.save(full, out / f"{place.coordinate.cell_rank} after {step}.pt")
            place.spans.take_sent()
            weight_sync.publish(step)
            sent = sum(size for (_, whom), size in place.spans.take_sent().items() if whom == "cell")
            seen["sent"] = (sent, moved_bytes(weight_sync.plan).sent[place.coordinate.cell_rank])
            if engine is not None and not torch.cuda.is_available():  # where kernels have forms of their own
                full = torch.load(out / f"0 after {step}.pt")
                seen["differing"].append(differing(engine, full, engine_tp, rank))
            seen["differences"].append(weight_sync.differences())
            if engine is not None and actor is not None:
                samples, sampled = answer(engine, step, 0)
                scored = actor.token_logprobs(samples)
                seen["gaps"].append([float(np.abs(a - b).mean()) for a, b in zip(sampled, scored, strict=True)])
            if actor is not None:
                actor.learn_supervised(LEARNT, num_trained_tokens=100)
        seen["behind"] = weight_sync.differences()
        seen["mended"] = weight_sync.differences()
        flipped = flip_a_bit(engine) if place.coordinate.cell_rank == shape.cell_size - 1 else None
        seen["flipped"] = flipped, weight_sync.differences()
        torch.save(seen, out / f"{place.coordinate.agent_rank}.pt")
        if engine is not None:
            engine.close()
        if actor is not None:
            parallel_state.destroy_model_parallel()
