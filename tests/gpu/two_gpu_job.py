"""The ranks of gpu/test_two_gpus.py: an engine and an agent's lane, as training uses them."""

from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file

from hacpo_mega.cluster.groups.tree import gather_bytes
from hacpo_mega.cluster.place import Place
from hacpo_mega.cluster.turns import agents_per_device, in_turn
from hacpo_mega.rollout.engine import Engine
from hacpo_mega.rollout.vllm.engine_spec import EngineSpec

MAX_MODEL_LEN = 256


def sequences() -> list[list[int]]:
    rng = np.random.default_rng(5)
    return [rng.integers(0, 131, size).tolist() for size in (2, 17, 140, MAX_MODEL_LEN - 1)]


def start(place: Place, folder: Path, tensor_parallel_size: int) -> tuple[Engine, int]:
    agents = agents_per_device(place)
    with in_turn(place, agents > 1):
        spec = EngineSpec(
            folder,
            max_model_len=MAX_MODEL_LEN,
            dtype=torch.bfloat16,
            eos_ids=[7],
            tensor_parallel_size=tensor_parallel_size,
            agents_on_device=agents,
        )
        engine = Engine(spec)
    return engine, agents


def engine_sleeps_and_wakes(place: Place, folder: Path, tensor_parallel_size: int) -> dict:
    """Log-probs awake and after a sleep, an answer before and after, and what was free when."""
    engine, agents = start(place, folder, tensor_parallel_size)
    weights, seen = load_file(folder / "model.safetensors"), {"agents": agents, "lane": lane_name(place)}
    seen["awake"], seen["answer"] = engine.logprobs(sequences()), answer(engine)
    place.barrier()  # on a shared device nobody else allocates while memory is read
    free = [torch.cuda.mem_get_info()[0]]
    place.barrier()
    engine.sleep()
    place.barrier()
    free.append(torch.cuda.mem_get_info()[0])
    place.barrier()
    engine.wake(cache=False)
    engine.load(weights.items())
    engine.wake()
    seen["woken"], seen["answer again"] = engine.logprobs(sequences()), answer(engine)
    seen["freed"] = (free[1] - free[0]) / torch.cuda.mem_get_info()[1]
    engine.close()
    return seen


def answer(engine: Engine) -> list[int]:
    (completion,) = engine.generate([sequences()[1]], [11], max_tokens=30, temperature=0.7)
    return completion.token_ids.tolist()


def lane_name(place: Place) -> str:
    return place.lane_group.name() if place.is_leader else ""


def lane_carries_bytes(place: Place) -> tuple[str, list[bytes]]:
    """Payloads of unequal lengths, one of them empty."""
    mine = bytes(range(256)) * 4099 if place.coordinate.global_rank else b""
    return lane_name(place), gather_bytes(place.lane_group, mine)
