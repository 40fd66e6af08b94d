"""The environment of a job's processes, and whether this process is one of them.

`hacpo-mega train|init|doctor CONFIG` outside a job starts one (local_job.py) and runs itself in every rank; inside one
(torchrun or srun) it goes on. Imports nothing heavy: what it sets must be set before torch and vllm are imported.
"""

import logging
import os
import shutil
import signal
import threading
import time
import warnings

# Set before torch, vllm or transformers are imported, and only where the user has not set them.
EVERYWHERE = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine lives in this process, beside the actor that feeds it
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
    "HF_HUB_OFFLINE": "1",  # models are folders; a typo must not become a download on 512 nodes
    "TRANSFORMERS_OFFLINE": "1",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "CUDA_DEVICE_MAX_CONNECTIONS": "1",  # Megatron overlaps tensor-parallel communication only in this order
    # Python's tracker frees the shared memory of vLLM when a process was told to end, and complains of having to.
    "PYTHONWARNINGS": "ignore:resource_tracker",
    "TORCH_GLOO_LAZY_INIT": "1",  # connect to whom we talk to, not all to all: 1000 ranks would need a million sockets
}
ON_CPU = {
    "TORCHDYNAMO_DISABLE": "1",  # spares an 18 s compilation on the first answer
}

LAUNCHER_PID = "HACPO_MEGA_LAUNCHER_PID"  # set by local_job.py for the ranks it starts


def prepare_environment() -> None:
    """Sets the variables above where they are not set. Must run before any heavy import."""
    for name, value in {**EVERYWHERE, **({} if _has_cuda() else ON_CPU)}.items():
        os.environ.setdefault(name, value)
    # vLLM reads its level when its first module has already warned.
    logging.getLogger("vllm").setLevel(os.environ["VLLM_LOGGING_LEVEL"].upper())
    # What is not installed (TransformerEngine, Apex) is a choice, and torch's renamings are Megatron's to follow.
    for module in (r"megatron\.", r"torch\.distributed"):
        warnings.filterwarnings("ignore", category=Warning, module=module)


def _has_cuda() -> bool:
    """Whether this machine has an NVIDIA driver, asked without importing torch."""
    return os.path.exists("/dev/nvidia0") or shutil.which("nvidia-smi") is not None


def end_with_launcher() -> None:
    """Ends this process when the local job that started it is gone: a killed launcher cannot end its ranks.

    And at once, without a traceback, by Ctrl-C: until watchdog.py heeds it, there is nothing to say.
    """
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    launcher = os.environ.get(LAUNCHER_PID)
    if launcher is not None:
        threading.Thread(target=_leave_with, args=(int(launcher),), name="launcher", daemon=True).start()


def _leave_with(launcher: int) -> None:
    while os.getppid() == launcher:
        time.sleep(1.0)
    os._exit(1)


def inside_a_job() -> bool:
    """Whether this process is one rank of a job."""
    return "RANK" in os.environ or "SLURM_PROCID" in os.environ


def is_first_of_its_node() -> bool:
    """Whether this process is the one of its node that says what all of them find; outside a job it is."""
    return int(os.environ.get("LOCAL_RANK") or os.environ.get("SLURM_LOCALID") or 0) == 0


def job_size() -> int:
    """Processes of the job that this process is in, as its launcher says; ValueError when it does not say."""
    value = os.environ.get("WORLD_SIZE") or os.environ.get("SLURM_NTASKS")
    if value is None:
        raise ValueError("neither WORLD_SIZE nor SLURM_NTASKS is set: start with launch/local.sh, torchrun or srun")
    return int(value)
