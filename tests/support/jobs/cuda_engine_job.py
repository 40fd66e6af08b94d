"""vLLM's own CUDA code for jobs/test_engine_on_cuda.py, as far as it runs without a device.

`visit` runs in a process of its own, since the one that judges must not import vLLM.
"""

import math
import os
from collections import Counter, deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from types import SimpleNamespace
from unittest import mock

import engine_streams
import numpy as np
import tenants
import torch
import torch.distributed as dist
from engine_streams import through_the_engine
from safetensors.torch import load_file
from vllm import SamplingParams, device_allocator
from vllm.config import CompilationConfig
from vllm.device_allocator import cumem
from vllm.device_allocator.sleep_mode_backend import CuMemBackend
from vllm.engine.arg_utils import EngineArgs
from vllm.platforms.interface import Platform
from vllm.utils import jit_monitor
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.engine.core import EngineCore
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager
from vllm.v1.worker.gpu_worker import Worker
from vllm.v1.worker.utils import request_memory

from hacpo_mega.rollout.engine import WEIGHTS, Engine, KeptTensors, pooled_weights, take_memory
from hacpo_mega.rollout.vllm.engine_spec import EngineSpec
from hacpo_mega.rollout.vllm.engine_stream_guard import finish_steps, worker_of
from hacpo_mega.rollout.vllm.engine_thread import EngineThread
from hacpo_mega.rollout.vllm.host_process import free_memory_unmeasured
from hacpo_mega.rollout.weights.engine_weights import EngineWeights, noting_names

GIB = 2**30
TOTAL, ACTOR = 80 * GIB, 3 * GIB
EOS = 7


class CudaNumbers(Platform):
    """vLLM's arithmetic of device numbers, on the variable that CUDA's platform reads."""

    device_control_env_var = "CUDA_VISIBLE_DEVICES"


def arguments(folder: Path, agents_on_device: int) -> dict:
    spec = EngineSpec(
        folder, max_model_len=256, dtype=torch.float32, tensor_parallel_size=2, agents_on_device=agents_on_device
    )  # fmt: skip
    return spec.vllm_arguments(on_cuda=True, visible_devices=1)


def error_of(action: Callable[[], object]) -> str:
    try:
        action()
    except (ValueError, IndexError, AssertionError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def start_two_engines(folder: Path, agents_on_device: int) -> None:
    """One after the other on one device, beside two actors."""
    free, share = TOTAL - 2 * ACTOR, arguments(folder, agents_on_device)["gpu_memory_utilization"]
    for _ in range(2):
        snapshot = SimpleNamespace(total_memory=TOTAL, free_memory=free, device_=torch.device("cuda", 0))
        free -= request_memory(snapshot, SimpleNamespace(gpu_memory_utilization=share))


def fall_asleep(others_take: int, measured: bool) -> None:
    """vLLM's worker at level 2 gives back 1 GiB, while another process of the device allocates `others_take` bytes."""
    free = [TOTAL // 2]
    torch.accelerator.synchronize = lambda *device: None
    torch.accelerator.get_memory_info = lambda *device: (free[0], TOTAL)
    worker = SimpleNamespace(
        model_runner=SimpleNamespace(model=torch.nn.Linear(2, 2)),
        sleep_mode_backend=SimpleNamespace(suspend=lambda level: free.append(free.pop() + GIB - others_take)),
        vllm_config=SimpleNamespace(model_config=SimpleNamespace(enable_nccl_comm_suspend=False)),
        _save_sleep_parameters=lambda model: None,
        get_draft_model=lambda: None,
    )
    with nullcontext() if measured else free_memory_unmeasured():
        Worker.sleep(worker, level=2)
    assert torch.accelerator.get_memory_info() == (free[0], TOTAL), "the reading is torch's own again"


def sequences() -> list[list[int]]:
    rng = np.random.default_rng(5)
    return [rng.integers(0, 131, size).tolist() for size in (2, 17, 140)]


def said_by(engine: Engine) -> tuple[list[np.ndarray], list[list[int]]]:
    """Log-probs of fixed sequences, and sampled answers."""
    answers = engine.generate(sequences(), [11, 12, 13], max_tokens=20, temperature=0.7)
    return engine.logprobs(sequences()), [answer.token_ids.tolist() for answer in answers]


def sleep_at_level_two(folder: Path) -> dict[str, object]:
    """Does level 2 of a device by hand: weights and buffers are garbage, vLLM restores buffers, we publish."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    engine = Engine(EngineSpec(folder, max_model_len=256, dtype=torch.float32, eos_ids=[7]))
    weights = load_file(folder / "model.safetensors")
    with engine._guard.open() as llm:
        runner = worker_of(llm).model_runner
    model = runner.model
    before = said_by(engine)
    parts = engine.weights({name: tuple(tensor.shape) for name, tensor in weights.items()})
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    workspace = torch.arange(1000.0)  # as kernels' are: made with the model, and no module names it
    made = SimpleNamespace(handle=(0, workspace.nbytes), tag=WEIGHTS)
    pool = SimpleNamespace(pointer_to_data={workspace.data_ptr(): made})
    with mock.patch("hacpo_mega.rollout.engine.get_mem_allocator_instance", return_value=pool):
        engine._kept = KeptTensors(model, pooled_weights())
    with woken_on_cuda(engine):
        engine.sleep()
    with torch.inference_mode():
        garbage = [*model.parameters(), *model.buffers(), workspace]
        for tensor in garbage:
            tensor.fill_(math.nan)
        with woken_on_cuda(engine):
            engine.wake(cache=False)
        for name, buffer in model.named_buffers():
            buffer.copy_(buffers[name])
        for layer in runner.kv_caches:
            layer.fill_(math.nan)
    receive(engine, parts, weights)
    with woken_on_cuda(engine):
        engine.wake()
    cleared = [float(layer.abs().max()) for layer in runner.kv_caches]
    after = said_by(engine)
    engine._on_cuda = True  # for what it would hand on there
    handed_on = [name for name, _ in noting_names(weights.items(), set(), packs_head=engine._packs_head())]
    engine._on_cuda = False
    streams = on_its_stream(engine, parts, weights)
    filled = sum(tensor.numel() for tensor in garbage)
    return {
        "before": before, "after": after, "filled": filled, "cleared": cleared, "streams": streams,
        "handed on": handed_on, "published": list(weights), "workspace": workspace.tolist(),
    }  # fmt: skip


def receive(engine: Engine, parts: EngineWeights, weights: dict[str, torch.Tensor]) -> None:
    """Publishes full tensors part by part, as the exchange of a cell does its pieces."""
    with engine.receiving(parts) as receiver:
        for number, part in enumerate(parts.parts):
            tensor = weights[part.shard.name]
            for dim, (start, size) in enumerate(zip(part.shard.offsets, part.shard.sizes)):
                tensor = tensor.narrow(dim, start, size)
            receiver.view(number, part.shard, tensor.dtype).copy_(tensor)
            receiver.wrote(number, part.shard.size)


def look(engine: Engine) -> None:
    """At what it holds."""
    with engine.held() as held:
        assert held


@contextmanager
def woken_on_cuda(engine: Engine) -> Iterator[None]:
    """The branches of CUDA in sleeping and waking; vLLM on the CPU has no memory to give back."""
    with engine._guard.open() as llm:
        pass
    engine._on_cuda = True
    with mock.patch.multiple(llm.llm_engine, sleep=mock.DEFAULT, wake_up=mock.DEFAULT):
        yield
    engine._on_cuda = False


def on_its_stream(
    engine: Engine, parts: EngineWeights, weights: dict[str, torch.Tensor]
) -> dict[str, set[tuple[str, str]]]:
    """Every method of the engine, and last its end."""

    def beside() -> None:
        thread = EngineThread()
        thread.begin(lambda is_unwanted: engine.generate(sequences(), [11, 12, 13], max_tokens=4))
        thread.finish()

    def turn() -> None:
        with woken_on_cuda(engine):
            engine.sleep()
            engine.wake()
        engine.load(weights.items())

    return through_the_engine(
        engine,
        {
            "load": lambda: engine.load(weights.items()),
            "generate": lambda: engine.generate(sequences(), [11, 12, 13], max_tokens=4),
            "generate beside": beside,
            "logprobs": lambda: engine.logprobs(sequences()),
            "weights": lambda: engine.weights({}),
            "receiving": lambda: receive(engine, parts, weights),
            "held": lambda: look(engine),
            "sleep and wake": turn,
            "close": engine.close,
        },
    )


def what_graphs_do(folder: Path) -> tuple[bool, tuple[str, ...]]:
    """vLLM's setting for graphs that leave the device, and what its allocator keeps in host memory at level 2."""
    kept = []
    device_allocator.get_mem_allocator_instance = lambda: SimpleNamespace(
        sleep=lambda offload_tags: kept.append(offload_tags)
    )
    CuMemBackend().suspend(level=2)
    return EngineArgs(**arguments(folder, 1)).sleep_mode_offload_cudagraph, kept[0]


def wake_on_a_full_device(room: int) -> tuple[str, list[str]]:
    """vLLM's worker and allocator, asleep, on a device with room for so many pieces: what is mapped in the end."""
    mapped: list[str] = []

    def create_and_map(handle: str) -> None:
        if len(mapped) == room:
            raise RuntimeError("out of memory")
        mapped.append(handle)

    allocator = object.__new__(cumem.CuMemAllocator)
    pieces = {"w1": "weights", "w2": "weights", "c1": "kv_cache", "c2": "kv_cache"}
    allocator.pointer_to_data = {
        name: cumem.AllocationData((0, 1, name, name), tag, is_asleep=True) for name, tag in pieces.items()
    }
    worker = SimpleNamespace(sleep_mode_backend=CuMemBackend())
    worker.discard = partial(Worker.discard, worker)
    executor = SimpleNamespace(driver_worker=SimpleNamespace(worker=worker))
    llm = SimpleNamespace(
        wake_up=lambda tags: worker.sleep_mode_backend.resume(tags), llm_engine=SimpleNamespace(model_executor=executor)
    )
    on_device = mock.patch.multiple(
        cumem, create_and_map=lambda handle: create_and_map(handle[2]), unmap_and_release=lambda h: mapped.remove(h[2])
    )
    torch_on_device = mock.patch.multiple(torch.accelerator, empty_cache=mock.DEFAULT, synchronize=mock.DEFAULT)
    with (
        on_device,
        torch_on_device,
        mock.patch.object(torch.cuda, "empty_cache"),
        mock.patch.object(device_allocator, "get_mem_allocator_instance", return_value=allocator),
    ):
        said = error_of(lambda: (take_memory(llm, ["weights"]), take_memory(llm, ["kv_cache"])))
    return said, sorted(mapped)


def steps_in_flight(folder: Path) -> list[tuple[int, int]]:
    """vLLM's own queue of steps and its scheduler for it around a model that draws token 5, or 7, which ends an answer.

    Steps in flight when the last answer has ended, by its length or by its own end, and after `finish_steps`.
    """
    arguments = {"dtype": "float32", "max_model_len": 64, "skip_tokenizer_init": True, "enable_prefix_caching": False}
    config = EngineArgs(model=str(folder), **arguments).create_engine_config()
    config.scheduler_config.async_scheduling, config.cache_config.num_gpu_blocks = True, 64
    spec = FullAttentionSpec(block_size=16, num_kv_heads=1, head_size=16, dtype=torch.float32)
    cache = KVCacheConfig(num_blocks=64, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)])
    core = EngineCore.__new__(EngineCore)
    core.vllm_config, core.log_stats, core.is_pooling_model, core.is_mm_encoder_only = config, False, False, False
    core.check_for_draft_tokens, core.use_spec_decode, core._weight_version = False, False, None
    core.batch_queue_size, core.batch_queue, core.aborts_queue = 2, deque(maxlen=2), SimpleQueue()
    core.scheduler = AsyncScheduler(
        vllm_config=config, kv_cache_config=cache, structured_output_manager=StructuredOutputManager(config),
        block_size=16, hash_block_size=16, log_stats=False,
    )  # fmt: skip
    core.step_fn, drawn, begun = core.step_with_batch_queue, Counter(), []

    def execute_model(step, non_block: bool) -> Future:
        begun.append(step)
        return done(EMPTY_MODEL_RUNNER_OUTPUT)

    def sample_tokens(_grammar, non_block: bool) -> Future:
        names = list(begun[-1].num_scheduled_tokens)
        drawn.update(names)
        tokens = [[EOS if drawn[name] == int(name) else 5] for name in names]
        return done(ModelRunnerOutput(names, {name: row for row, name in enumerate(names)}, tokens))

    core.model_executor = SimpleNamespace(execute_model=execute_model, sample_tokens=sample_tokens)
    llm = SimpleNamespace(llm_engine=SimpleNamespace(engine_core=SimpleNamespace(engine_core=core)))
    found = []
    for names in (["3", "99"], ["4", "5"]):
        left = set(names)
        for name in names:
            sampling = SamplingParams(max_tokens=8, stop_token_ids=[EOS])
            core.scheduler.add_request(Request(name, list(range(8, 28)), sampling, None))
        while left:  # as vLLM, until all have ended
            outputs, _ = core.step_fn()
            left -= {one.request_id for mine in (outputs or {}).values() for one in mine.outputs if one.finished}
        in_flight = len(core.batch_queue)
        finish_steps(llm)
        found.append((in_flight, len(core.batch_queue)))
    return found


def watches_compilation() -> bool:
    """True if vLLM's worker, warm, watches what this process compiles."""
    monitor = SimpleNamespace(jit_monitor_mode="warn", jit_monitor_verbose=False)
    warm = SimpleNamespace(kernel_config=SimpleNamespace(enable_jit_warmup=True))
    Worker._maybe_activate_jit_monitor(SimpleNamespace(vllm_config=warm, observability_config=monitor))
    return jit_monitor.is_active()


def done(result: object) -> Future:
    future: Future = Future()
    future.set_result(result)
    return future


def visit(folder: Path) -> dict[str, object]:
    level_two, streams = sleep_at_level_two(folder), engine_streams.visit()
    os.environ["CUDA_VISIBLE_DEVICES"] = "3"
    return {
        "level 2": level_two,
        "streams": streams,
        "tenants": tenants.visit(),
        "off the device": {
            (policy, offloads, fails): tenants.split_steps(policy, offloads=offloads, fails=fails)
            for policy, offloads in (("split", False), ("split", True), ("one step off", False), ("apart", False))
            for fails in (False, True)
        },
        "full": [wake_on_a_full_device(room) for room in range(5)],
        "peer's device": error_of(lambda: CudaNumbers.logical_device_id_to_visible_device_id(1)),
        "starts": [error_of(lambda agents=agents: start_two_engines(folder, agents)) for agents in (1, 2)],
        "alone": error_of(lambda: fall_asleep(0, measured=True)),
        "shared": error_of(lambda: fall_asleep(2 * GIB, measured=True)),
        "shared, unmeasured": error_of(lambda: fall_asleep(2 * GIB, measured=False)),
        "graphs": what_graphs_do(folder),
        "watches": watches_compilation(),
        "in flight": steps_in_flight(folder),
        "fused": CompilationConfig(**arguments(folder, 1)["compilation_config"]).pass_config.fuse_allreduce_rms,
    }
