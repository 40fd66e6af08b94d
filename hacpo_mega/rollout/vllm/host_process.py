"""Isolation shims for vLLM in the trainer process: random streams, threads, environment, process groups.

Each function undoes or prevents one effect of vLLM on its process, which it expects to own.
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
from vllm.v1.executor.uniproc_executor import ExecutorWithExternalLauncher

from hacpo_mega.cluster.groups.tree import share_bytes
from hacpo_mega.cluster.patches import Patch, apply_patches

SHARED_MEMORY = Path("/dev/shm")
# Variables from which torch's allocator reads its settings.
ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


@contextmanager
def process_untouched() -> Iterator[None]:
    """Restores the global generators of Python, NumPy and torch, which every call of vLLM seeds and draws from.

    On CPU it also restores torch.set_num_threads, which vLLM replaces when it starts.
    A no-op in a thread beside training (engine_thread.py): the main thread uses these generators meanwhile. Answers
    draw from none of them (row_noise.py; on CUDA vLLM's own kernel).
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
    """Device and stream for a thread: the device of the thread that made this, and a stream other than the trainer's.

    The thread's work is ordered behind the work queued so far. On exit the device has finished it, also after an error.
    On the CPU the thread computes with as many threads as the one that it follows.
    """

    def __init__(self) -> None:
        # One for all calls: torch has 32, and hands out the first again after the last.
        self._stream = torch.cuda.Stream() if torch.cuda.is_available() else None

    def follow(self) -> AbstractContextManager[None]:
        """Context for the thread to enter; called by the thread that it follows."""
        if self._stream is None:
            return _computing_with(torch.get_num_threads())
        return self._entered(self._stream, torch.cuda.current_stream().record_event())

    @staticmethod
    @contextmanager
    def _entered(stream: torch.cuda.Stream, queued: torch.cuda.Event) -> Iterator[None]:
        torch.cuda.set_device(stream.device)  # a new thread is on device 0, and on the trainer's stream there
        stream.wait_event(queued)
        with torch.cuda.stream(stream):
            try:
                yield
            finally:
                stream.synchronize()


@contextmanager
def _computing_with(num_threads: int) -> Iterator[None]:
    """Sets the thread count of a new thread.

    OpenMP would give it the OMP_NUM_THREADS that it read when it was loaded, before a fork. torch would replace that at
    the thread's first operation: within vLLM's attention, whose plan was made for another number.
    """
    torch.set_num_threads(num_threads)
    yield


def require_process(tensor_parallel_size: int) -> None:
    """ValueError if this process cannot host an engine over `tensor_parallel_size` ranks."""
    if os.environ.get("VLLM_ENABLE_V1_MULTIPROCESSING") != "0":
        raise ValueError(
            "VLLM_ENABLE_V1_MULTIPROCESSING is "
            f"{os.environ.get('VLLM_ENABLE_V1_MULTIPROCESSING', 'not set')}; the engine must live in the trainer's "
            "process: set it to 0 before Python starts, or start with hacpo-mega, which does"
        )
    assert dist.is_initialized(), "the agent's default process group is made before its engine (job_groups.py)"
    if dist.get_world_size() % tensor_parallel_size:
        raise ValueError(f"engine_tp ({tensor_parallel_size}) must divide the agent's {dist.get_world_size()} ranks")


def has_expandable_segments() -> bool:
    """True if the user has set expandable segments in torch's allocator."""
    return any("expandable_segments:True" in os.environ.get(name, "") for name in ALLOCATOR)


@contextmanager
def joined_to_default_group() -> Iterator[None]:
    """Builds vLLM on the agent's default process group instead of the job's RANK, which counts over all agents.

    The name matters on CPU: vLLM's ranks meet in shared memory under the text after the last colon and their rank
    numbers. Two agents or jobs on one machine have equal numbers and would read each other's activations.
    """
    name = share_bytes(dist.group.WORLD, secrets.token_hex(8).encode()).decode()
    local_rank = torch.cuda.current_device() if torch.cuda.is_available() else dist.get_rank()
    arguments = (f"env://:{name}", dist.get_rank(), local_rank)
    with replaced(ExecutorWithExternalLauncher, "_distributed_args", lambda executor: arguments):
        yield
    if not torch.cuda.is_available():
        # vLLM removes these files at shutdown, which a killed process never reaches: it would leak 8 MiB. Once all
        # ranks of all engines have mapped them, their names are not needed. Without a name the kernel frees them
        # with the last process, however that ends.
        dist.barrier()
        for segment in SHARED_MEMORY.glob(f"{name}-*-cpushm_*"):
            segment.unlink(missing_ok=True)


@contextmanager
def collected_once() -> Iterator[None]:
    """Reduces vLLM's shutdown from four garbage collections of all objects to one of those made after the imports."""
    with replaced(gc, "collect", lambda *_generation: 0), same_objects_frozen():
        yield
    gc.collect()


@contextmanager
def same_objects_frozen() -> Iterator[None]:
    """Keeps vLLM from freezing and thawing objects for the garbage collector.

    It freezes them at its start and thaws all at its end, those of the imports too (cli/start.py): two million, whose
    collection takes longer than the rest of the shutdown. The engine itself must not be frozen, or it is not freed.
    """
    with replaced(gc, "freeze", lambda: None), replaced(gc, "unfreeze", lambda: None):
        yield


@contextmanager
def free_memory_unmeasured() -> Iterator[None]:
    """Hides other processes' allocations from vLLM's sleep, which asserts that free memory has grown.

    vLLM reads the same free memory throughout.
    """
    reading = torch.accelerator.get_memory_info()
    with replaced(torch.accelerator, "get_memory_info", lambda *_device: reading):
        yield


def keeping_default_group(teardown: Callable[[], None]) -> Callable[[], None]:
    """vLLM's teardown of its groups, without the destruction of the default group, which the actor still needs."""

    def destroy_own_groups() -> None:
        destroy = dist.destroy_process_group
        with replaced(dist, "destroy_process_group", lambda group=None: None if group is None else destroy(group)):
            teardown()

    return destroy_own_groups


def without_message_queue(make_group: Callable[..., Any]) -> Callable[..., Any]:
    """vLLM's maker of model-parallel groups without the message queue of a group over several ranks.

    The queue unpickles whatever its sockets bring: files under the temporary folder on one node, TCP on all interfaces
    over several. Where every rank drives its own worker it carries nothing; the few objects that vLLM shares then go by
    torch's collectives, which take plain values alone (cluster/patches.py).
    """

    def make(*arguments: Any, **options: Any) -> Any:
        return make_group(*arguments, **options | {"use_message_queue_broadcaster": False})

    return make


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Context in which an attribute has another value."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


@contextmanager
def starting_vllm(patches: Iterable[Patch]) -> Iterator[None]:
    """Context of vLLM's start: applies the patches, and restores two environment variables; freezes no object.

    vLLM extends LD_PRELOAD on a CPU, which the judge's processes would inherit. The context also silences a warning
    with a traceback: without a tokenizer, vLLM's renderer cannot warm up a chat template.
    """
    apply_patches(patches)
    before = {name: os.environ.get(name) for name in ("LD_PRELOAD", "LOCAL_WORLD_SIZE")}
    try:
        with replaced(logging.getLogger("vllm.renderers.base"), "disabled", True), same_objects_frozen():
            yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value
