"""Suspicions that only a device decides: queues, memory outside torch, the allocator, handles of memory, imports.

Others are decided elsewhere: own ratios of exactly 1 (test_actor_gpu.py), steps in flight and replayed routing
(test_engine_gpu.py), a reload of fp8 by block (test_quantized_gpu.py).
"""

import io
import os
import pickle
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
from actor_cases import make_actor, objective, one_rank, random_samples
from bf16_cases import make_folder
from job import run_job

from hacpo_mega.cluster.patches import PlainUnpickler
from hacpo_mega.cluster.rank_map import AgentShape, RankMap
from hacpo_mega.megatron.model.installed import TE_VERSION
from hacpo_mega.memory.budget import CONTEXT

pytestmark = pytest.mark.gpu
on_a_device = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
COMMUNICATORS = 8  # of an actor and an engine over the same ranks
# The share of a stream's long work after which a short kernel of another stream, queued behind it, has ended.
QUEUES = """
import torch
long, short = torch.cuda.Stream(), torch.cuda.Stream()
matrix, number = torch.randn(4096, 4096, device="cuda"), torch.zeros(1, device="cuda")
begin, end, done = (torch.cuda.Event(enable_timing=True) for _ in range(3))
for _ in range(2):
    torch.cuda.synchronize()
    with torch.cuda.stream(long):
        begin.record()
        for _ in range(40):
            matrix = matrix @ matrix / 64
        end.record()
    with torch.cuda.stream(short):
        number.add_(1)
        done.record()
    torch.cuda.synchronize()
print(begin.elapsed_time(done) / begin.elapsed_time(end))
"""


def printed(program: str, **variables: str) -> str:
    command = [sys.executable, "-c", program]
    return subprocess.run(command, env=os.environ | variables, capture_output=True, text=True, check=True).stdout


@on_a_device
@pytest.mark.parametrize("queues, waits", [("1", True), ("8", False)])
def test_one_queue_makes_other_streams_wait(queues, waits):
    """environment.py sets it for tensor parallelism alone, since whatever else the process does queues behind it."""
    assert (float(printed(QUEUES, CUDA_DEVICE_MAX_CONNECTIONS=queues)) > 0.5) is waits


def outside_torch(_place, _ranks) -> int:
    """Bytes of a device that this process holds beside torch's allocator, with communicators that have been used."""
    for _ in range(COMMUNICATORS):
        numbers = torch.ones(1 << 20, device="cuda")
        dist.all_reduce(numbers, group=dist.new_group(backend="nccl"))
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    return total - free - torch.cuda.memory_reserved()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices, otherwise unused")
def test_context_and_communicators_are_within_the_budget():
    assert max(run_job(RankMap(1, (AgentShape("a", tp=2),)), outside_torch)) < CONTEXT


@on_a_device
def test_micro_batches_of_all_lengths_need_no_second_try(tmp_path):
    """A retry frees all cached memory, with a wait for the device. A quarter more than the peak is left."""
    with one_rank("nccl"):
        actor = make_actor(make_folder(tmp_path / "model", "qwen3"))
        actor.learn(random_samples(24, seed=1), objective)
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, 1.25 * torch.cuda.max_memory_reserved() / total))
        before = torch.cuda.memory_stats()["num_alloc_retries"]
        for seed in range(2, 22):
            actor.learn(random_samples(4 + seed, seed=seed), objective)
        torch.cuda.set_per_process_memory_fraction(1.0)
        assert torch.cuda.memory_stats()["num_alloc_retries"] == before


def read_by_a_peer(value: object) -> object:
    return PlainUnpickler(io.BytesIO(pickle.dumps(value))).load()


@pytest.mark.parametrize("on_device", [False, pytest.param(True, marks=on_a_device)])
def test_handles_of_shared_memory_are_read(on_device):
    """As vLLM's custom all-reduce sends them: bytes in a tensor, then lists of numbers for its graphs."""
    handle = torch.arange(64, dtype=torch.uint8)
    if on_device:
        from vllm import _custom_ops as ops

        pointer, handle = ops.allocate_shared_buffer_and_handle(1 << 20)
        ops.free_shared_buffer(pointer)
    assert torch.equal(read_by_a_peer(handle), handle)
    of_graphs = [handle.tolist(), [0, 512]]
    assert read_by_a_peer(of_graphs) == of_graphs


@on_a_device
@pytest.mark.parametrize(
    "module",
    [
        "hacpo_mega.megatron.actor",
        pytest.param(
            "transformer_engine.pytorch", marks=pytest.mark.skipif(TE_VERSION is None, reason="needs TransformerEngine")
        ),
    ],
)
def test_importing_touches_no_device(module):
    """A context on device 0 would take its memory in every rank of a node."""
    assert printed(f"import torch, {module}; print(torch.cuda.is_initialized())").strip() == "False"
