"""The device of a process: its own GPU, or the CPU where torch is the CPU build.

Nothing falls back from one to the other. The vLLM of a CUDA environment has no CPU engine, and a CPU environment, which
`make env` installs on a login node without a driver, would train on a node with GPUs for days before anybody looks.
Elsewhere: who shares a device (turns.py).
"""

import os
from collections.abc import Sequence

import torch

from hacpo_mega.cluster.machine.driver import driver_needed
from hacpo_mega.cluster.machine.environment import shows_gpus

SENT_ALIGNED = 16  # bytes, as kernels read


def rank_device(local_rank: int) -> torch.device:
    """This process's GPU, by its number on the node, which it makes torch's current one; the CPU in a CPU environment.

    Raises ValueError where the environment and the machine do not fit, or there are fewer GPUs than processes.
    """
    require_fitting_environment()
    if not torch.cuda.is_available():
        return torch.device("cpu")
    # A launcher that binds tasks to GPUs shows each task one of them, as number 0. Several agents of one rank each may
    # also share a single GPU.
    index = 0 if torch.cuda.device_count() == 1 else local_rank
    if index >= torch.cuda.device_count():
        raise ValueError(
            f"process {local_rank} of this node has no GPU of its own: {torch.cuda.device_count()} are visible. Start "
            "at most one process per GPU and node, or let the agents take turns: placement = 'shared'."
        )
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def work_queue(device: torch.device) -> torch.Stream | None:
    """Stream that takes this thread's work for a GPU: any thread may `query` whether it is done. None on the CPU."""
    return torch.cuda.current_stream(device) if device.type == "cuda" else None


def actor_dtype(device: torch.device, name: str | None = None) -> torch.dtype:
    """Number format of the weights of an actor and its engine: `name` if given, else bf16 on CUDA, fp32 on the CPU."""
    return getattr(torch, name or ("bfloat16" if device.type == "cuda" else "float32"))


def send(tensors: Sequence[torch.Tensor | None], device: torch.device) -> list[torch.Tensor | None]:
    """Tensors of the host on `device`, by one copy out of pinned memory: the host does not wait for the device's queue.

    None stays None.
    """
    starts = [0]
    for tensor in tensors:
        size = 0 if tensor is None else tensor.numel() * tensor.element_size()
        starts.append(starts[-1] + -(-size // SENT_ALIGNED) * SENT_ALIGNED)
    packed = torch.empty(starts[-1], dtype=torch.uint8, pin_memory=device.type == "cuda")
    for start, tensor in zip(starts, tensors):
        if tensor is not None:
            _part(packed, start, tensor).copy_(tensor)
    packed = packed.to(device, non_blocking=True)
    return [None if tensor is None else _part(packed, start, tensor) for start, tensor in zip(starts, tensors)]


def _part(packed: torch.Tensor, start: int, like: torch.Tensor) -> torch.Tensor:
    """View of the bytes from `start` on, with dtype and shape of `like`."""
    return packed[start : start + like.numel() * like.element_size()].view(like.dtype).view(like.shape)


def require_fitting_environment() -> None:
    """Raises ValueError where torch's build cannot use this machine, or leaves its GPUs unused unasked."""
    if torch.cuda.is_available():
        return
    if torch.version.cuda is not None:
        raise ValueError(
            f"torch {torch.__version__} is the CUDA {torch.version.cuda} build, but no GPU can be used here: "
            f"{_why_no_gpu()}. Start on a node with a GPU and a {driver_needed(torch.version.cuda)} (nvidia-smi shows "
            "both), or make a CPU environment: make env FLAVOUR=cpu"
        )
    if shows_gpus() and os.environ.get("CUDA_VISIBLE_DEVICES") != "":
        raise ValueError(
            f"this machine has a GPU, but torch {torch.__version__} is the CPU build: make env FLAVOUR=cuda; or say "
            "CUDA_VISIBLE_DEVICES= (empty) to train on the CPU all the same"
        )


def _why_no_gpu() -> str:
    """torch's own message: no driver, one that is too old, none visible."""
    try:
        torch.cuda.init()
    except RuntimeError as error:
        return str(error).strip().split("\n")[0].rstrip(".")
    return "torch.cuda.is_available() is false"
