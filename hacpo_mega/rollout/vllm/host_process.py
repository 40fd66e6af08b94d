"""How a trainer's process hosts vLLM and stays itself: random streams, threads, environment, process groups.

Each function here answers something that vLLM does to the process it lives in, because it expects to own it.
It gets what it needs of vLLM handed in; only engine.py imports vllm.
"""

import gc
import logging
import os
import random
import secrets
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from hacpo_mega.cluster.groups.tree import share_bytes
from hacpo_mega.cluster.patches import Patch, apply_patches

SHARED_MEMORY = Path("/dev/shm")
# Where torch's allocator reads its settings.
ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


@contextmanager
def process_untouched() -> Iterator[None]:
    """Around every call of vLLM: it seeds and draws from the global generators of Python, NumPy and torch.

    On CPU it also replaces torch.set_num_threads, when it starts.
    Not in a thread beside training (engine_thread.py): what was put back there would be taken from the main thread.
    Answers are drawn from none of them (row_noise.py; on CUDA vLLM's own kernel).
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    python_state, numpy_state = random.getstate(), np.random.get_state()
    set_num_threads, num_threads = torch.set_num_threads, torch.get_num_threads()
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    try:
        with torch.random.fork_rng(devices=devices), warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)
        torch.set_num_threads = set_num_threads
        if torch.get_num_threads() != num_threads:
            torch.set_num_threads(num_threads)


class StreamBeside:
    """For a thread: the device of the thread that made this, and on it a stream that is not the trainer's.

    What the thread asks there follows what was asked so far; left, the device has done it, also after an error. On the
    CPU it computes with as many threads as whom it follows.
    """

    def __init__(self) -> None:
        # One for all calls: torch has 32, and hands out the first again after the last.
        self._stream = torch.cuda.Stream() if torch.cuda.is_available() else None

    def follow(self) -> AbstractContextManager[None]:
        """To be entered by the thread; asked by whom it follows."""
        if self._stream is None:
            return _computing_with(torch.get_num_threads())
        return self._entered(self._stream, torch.cuda.current_stream().record_event())

    @staticmethod
    @contextmanager
    def _entered(stream: torch.cuda.Stream, asked: torch.cuda.Event) -> Iterator[None]:
        torch.cuda.set_device(stream.device)  # a new thread is on device 0, and on the trainer's stream there
        stream.wait_event(asked)
        with torch.cuda.stream(stream):
            try:
                yield
            finally:
                stream.synchronize()


@contextmanager
def _computing_with(num_threads: int) -> Iterator[None]:
    """In a new thread, for which OpenMP counts what OMP_NUM_THREADS was when it was loaded: before a fork another.

    torch tells it its own number at its first operation there, in the middle of vLLM's, whose attention then finds
    another number than its plan was made for.
    """
    torch.set_num_threads(num_threads)
    yield


def require_process(tensor_parallel_size: int) -> None:
    """ValueError where this process cannot host an engine over so many ranks."""
    if os.environ.get("VLLM_ENABLE_V1_MULTIPROCESSING") != "0":
        raise ValueError(
            "VLLM_ENABLE_V1_MULTIPROCESSING is "
            f"{os.environ.get('VLLM_ENABLE_V1_MULTIPROCESSING', 'not set')}; the engine must live in the trainer's "
            "process: set it to 0 before Python starts, or start with hacpo-mega, which does"
        )
    assert dist.is_initialized(), "the agent's default process group is made before its engine (place.py)"
    if dist.get_world_size() % tensor_parallel_size:
        raise ValueError(f"engine_tp ({tensor_parallel_size}) must divide the agent's {dist.get_world_size()} ranks")


def has_expandable_segments() -> bool:
    """Whether the user has told torch's allocator so."""
    return any("expandable_segments:True" in os.environ.get(name, "") for name in ALLOCATOR)


@contextmanager
def joined_to_default_group(launcher: type) -> Iterator[None]:
    """Build vLLM on the agent's default process group, not on the job's RANK, which counts over all agents.

    The name matters on CPU: vLLM's ranks meet in shared memory under the text after the last colon and their rank
    numbers. Two agents of one machine, or two jobs, have equal numbers and would read each other's activations.
    """
    name = share_bytes(dist.group.WORLD, secrets.token_hex(8).encode()).decode()
    local_rank = torch.cuda.current_device() if torch.cuda.is_available() else dist.get_rank()
    arguments = (f"env://:{name}", dist.get_rank(), local_rank)
    with _replaced(launcher, "_distributed_args", lambda executor: arguments):
        yield
    if not torch.cuda.is_available():
        # vLLM removes these files when it is shut down, which a killed process never is: 8 MiB of memory would be lost.
        # Once all ranks of all engines have mapped them nobody looks for their names any more, and without a name the
        # kernel frees them with the last process, however that ends.
        dist.barrier()
        for segment in SHARED_MEMORY.glob(f"{name}-*-cpushm_*"):
            segment.unlink(missing_ok=True)


@contextmanager
def collected_once() -> Iterator[None]:
    """Around vLLM's end: it looks for garbage four times, half a second each, in all that was ever imported."""
    with _replaced(gc, "collect", lambda *_generation: 0):
        yield
    gc.collect()


@contextmanager
def free_memory_unmeasured() -> Iterator[None]:
    """Around vLLM's sleep on a device that other processes use: it asserts that the device has more free memory after.

    What they allocate meanwhile would look like memory that sleeping took; so it is shown one reading throughout.
    """
    reading = torch.accelerator.get_memory_info()
    with _replaced(torch.accelerator, "get_memory_info", lambda *_device: reading):
        yield


def keeping_default_group(teardown: Callable[[], None]) -> Callable[[], None]:
    """vLLM's teardown of its groups, less its last line, which destroys the default group. The actor still needs it."""

    def destroy_own_groups() -> None:
        destroy = dist.destroy_process_group
        with _replaced(dist, "destroy_process_group", lambda group=None: None if group is None else destroy(group)):
            teardown()

    return destroy_own_groups


def without_message_queue(make_group: Callable[..., Any]) -> Callable[..., Any]:
    """vLLM's maker of model-parallel groups, less the queue that a group over several ranks would get.

    It unpickles whatever its sockets bring: of files under the temporary folder on one node, of TCP on all interfaces
    over several. Where every rank drives its own worker nobody says anything there; the few objects that vLLM has to
    share go by torch's collectives then, which take plain values alone (cluster/security/peer_objects.py).
    """

    def make(*arguments: Any, **options: Any) -> Any:
        return make_group(*arguments, **options | {"use_message_queue_broadcaster": False})

    return make


def unwatched(**_how: Any) -> None:
    """Stands for vLLM's monitor of late compilation, which is not started."""


@contextmanager
def quiet(logger: logging.Logger) -> Iterator[None]:
    """Around what vLLM would warn of although it is meant."""
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before


@contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


@contextmanager
def starting_vllm(patches: Iterable[Patch]) -> Iterator[None]:
    """Around vLLM's start, with its names replaced: it gives up what it adds to the environment.

    On a CPU it adds to LD_PRELOAD, which would reach the processes that judge answers. Without a tokenizer its renderer
    warns, with a traceback, that it cannot warm up a chat template: that is not shown.
    """
    apply_patches(patches)
    before = {name: os.environ.get(name) for name in ("LD_PRELOAD", "LOCAL_WORLD_SIZE")}
    try:
        with quiet(logging.getLogger("vllm.renderers.base")):
            yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value
