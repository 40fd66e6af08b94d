"""The job of jobs/test_engine.py: two processes of one agent on one machine, real vLLM engines.

First one engine with tensor parallel 2, then two replicas. Every process writes what it saw to OUT/<agent>-<rank>.pt;
the tests judge it.
"""

import os
import random
from contextlib import suppress
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import turn_sources
from job import TIMEOUT_S
from safetensors.torch import load_file
from vllm.distributed import parallel_state

from hacpo_mega.cluster.place import Place
from hacpo_mega.cluster.rank_map import AgentShape, RankMap
from hacpo_mega.rollout.engine import Completion, Engine
from hacpo_mega.rollout.vllm.engine_spec import EngineSpec
from hacpo_mega.rollout.vllm.engine_thread import EngineThread
from hacpo_mega.rollout.vllm.row_noise import answer_seed

EOS = 7
MAX_MODEL_LEN = 256
TEMPERATURE = 0.7
NUM_DRAWS = 3000


def sequences() -> list[list[int]]:
    """Random tokens, from the shortest that can be scored to the longest; one fills a whole block of cached prefix."""
    rng = np.random.default_rng(5)
    return [rng.integers(0, 131, size).tolist() for size in (2, 3, 17, 140, MAX_MODEL_LEN - 1)]


def prompts() -> list[list[int]]:
    """A prompt longer than vLLM's cache block (128 tokens), and short ones."""
    return [sequences()[3], *([size, 3, size] for size in range(40))]


def message(action) -> str:
    """The error that `action` ends with, by type and text."""
    try:
        action()
    except (ValueError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def shared_memory_mode(line: str) -> int | None:
    """The file mode of a mapping, by a line of /proc/self/maps; None where that may not be asked."""
    addresses = (int(address, 16) for address in line.split()[0].split("-"))
    with suppress(OSError):
        return os.stat("/proc/self/map_files/{:x}-{:x}".format(*addresses)).st_mode & 0o777
    return None


def weights(folder: Path):
    return load_file(folder / "model.safetensors")


def process_state() -> tuple:
    return (
        torch.get_rng_state().tolist(),
        random.getstate(),
        np.random.get_state()[1].tolist(),
        torch.set_num_threads.__module__,
        torch.get_num_threads(),
        torch.get_default_dtype(),
        torch.get_float32_matmul_precision(),
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        os.environ.get("LD_PRELOAD"),
        os.environ.get("LOCAL_WORLD_SIZE"),
        dist.get_world_size(),
    )


def draw(
    engine: Engine, indices, *, step: int = 0, temperature: float = TEMPERATURE, return_logprobs: bool = True, **watched
):
    """Answers to the prompts of `indices`, each under the seed of its own place."""
    asked = [prompts()[index] for index in indices]
    seeds = [answer_seed(1, step, index, 0, 0) for index in indices]
    sampling = {"temperature": temperature, "return_logprobs": return_logprobs}
    answers = engine.generate(asked, seeds, max_tokens=40, **sampling, **watched)
    return [plain(answer) for answer in answers]


def plain(answer: Completion) -> tuple:
    """An answer without our class: the process that judges must not import vllm."""
    return answer.token_ids, answer.stop, answer.logprobs


def tensor_parallel(models: Path, agent: str) -> dict:
    """One engine over both ranks: scores, publishing, sampling."""
    before = process_state()
    engine = build(models / agent, tensor_parallel_size=2)
    seen = {"start": engine.logprobs(sequences())}
    everyone = range(len(prompts()))
    draw(engine, everyone)  # fills the prefix cache with the first model's keys and values
    published = weights(models / f"{agent}-other")
    engine.load(published.items())
    for tensor in published.values():
        tensor.zero_()
    seen["published"] = engine.logprobs(sequences())
    seen["answers"] = draw(engine, everyone)
    told: list[tuple[int, tuple]] = []
    seen["told"] = told
    watched = {
        "on_answer": lambda *answer: told.append(answer),
        "is_unwanted": lambda: dist.get_rank() == 0 and len(told) >= 1,  # the other rank hears of it late
    }
    seen["cut"] = draw(engine, everyone, **watched)
    told[:] = [(place, plain(answer)) for place, answer in told]
    seen["again"] = draw(engine, everyone)
    seen["unasked"] = draw(engine, everyone, return_logprobs=False)
    seen["backwards"] = draw(engine, everyone[::-1])[::-1]
    seen["alone"] = draw(engine, [0]) + draw(engine, [3])
    seen["served"] = turn_sources.seen_by(engine, prompts())
    seen["after"] = draw(engine, everyone)
    seen["other step"] = draw(engine, everyone, step=1)
    seen["greedy"] = draw(engine, everyone, temperature=0.0)
    seen["process"] = (before, process_state())
    maps = Path("/proc/self/maps").read_text().splitlines()
    seen["shared memory"] = [line for line in maps if "/dev/shm/" in line and "cpushm" in line]
    seen["shared memory modes"] = [shared_memory_mode(line) for line in seen["shared memory"]]
    seen["queue"] = parallel_state.get_tp_group().mq_broadcaster
    seen["has shared memory"] = hasattr(torch.ops._C, "init_shm_manager")
    engine.close()
    return seen


def replicas(models: Path, agent: str) -> dict:
    """One engine per rank, asked different things: sleeping, refusing, statistics."""
    engine = build(models / agent, random_weights=True)
    seen = {"unloaded": message(lambda: engine.logprobs(sequences()))}
    full = weights(models / agent)
    engine.load(full.items())
    mine = sequences()[dist.get_rank() :]
    seen["replica"] = engine.logprobs(mine)
    engine.sleep()
    seen["asleep"] = [
        message(action) for action in (lambda: draw(engine, [0]), lambda: engine.load(full.items()), engine.sleep)
    ]
    engine.wake(cache=False)
    seen["no cache"] = message(lambda: draw(engine, [0]))
    engine.load(full.items())
    engine.wake()
    seen["awake"] = [engine.logprobs(mine), message(engine.wake)]
    engine.sleep()
    engine.wake()
    seen["forgot"] = message(lambda: draw(engine, [0]))
    lacking = {name: tensor for name, tensor in full.items() if "layers.1.mlp.down_proj" not in name}
    seen["lacking"] = message(lambda: engine.load(lacking.items()))
    seen["lacking refuses"] = message(lambda: draw(engine, [0]))
    engine.load(full.items())
    seen["too long"] = message(lambda: engine.generate([[1] * 250], [0], max_tokens=7))
    seen["just fits"] = plain(engine.generate([[1] * 250], [0], max_tokens=6)[0])
    seen["no score"] = message(lambda: engine.logprobs([[1] * MAX_MODEL_LEN]))
    seen["empty"] = engine.generate([], [], max_tokens=6)
    few = range(8)
    thread, before = EngineThread(), process_state()
    thread.begin(partial(draw, engine, few))
    seen["beside"] = thread.finish()
    seen["process beside"] = (before, process_state())
    seen["here"] = draw(engine, few)
    seen["unwanted"] = draw(engine, few, is_unwanted=lambda: True)
    seeds = [answer_seed(1, 0, 0, rollout, dist.get_rank()) for rollout in range(NUM_DRAWS)]
    engine.load(weights(models / f"{agent}-other").items())
    seen["replica answers"] = draw(engine, range(len(prompts())))
    engine.load(full.items())
    seen["draws"] = [c.token_ids[0] for c in engine.generate([sequences()[0]] * NUM_DRAWS, seeds, max_tokens=1)]
    engine.close()
    return seen


def build(folder: Path, **options) -> Engine:
    return Engine(EngineSpec(folder, max_model_len=MAX_MODEL_LEN, dtype=torch.float32, eos_ids=[EOS], **options))


def third_family(models: Path) -> dict:
    engine = build(models / "qwen2")
    seen = {"qwen2": engine.logprobs(sequences())}
    weight = torch.ones(3, requires_grad=True)
    (weight * 2).sum().backward()
    seen["gradient"] = weight.grad
    engine.close()
    return seen


def refusals(models: Path) -> dict:
    folder = models / "qwen3"
    seen = {
        "owned": message(lambda: build(folder, options={"dtype": "bfloat16"})),
        "indivisible": message(lambda: build(folder, tensor_parallel_size=3)),
        "head size": message(lambda: build(models / "narrow")),
        "seeds": {answer_seed(1, *place) for place in np.ndindex(3, 20, 8, 2)},
        "seed": answer_seed(7, 3, 11, 2, 1),
    }
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"
    seen["environment"] = message(lambda: build(folder))
    return seen


def main(models: Path, out: Path, agent: str) -> None:
    with Place.join(RankMap(lanes=1, agents=(AgentShape(agent, tp=2),)), TIMEOUT_S) as place:
        random.seed(3)
        np.random.seed(3)
        torch.manual_seed(3)
        seen = {"sequences": sequences(), "prompts": prompts()}
        seen |= tensor_parallel(models, agent) | replicas(models, agent)
        if agent == "llama":
            seen |= third_family(models) | refusals(models)
        torch.save(seen, out / f"{agent}-{place.coordinate.agent_rank}.pt")
