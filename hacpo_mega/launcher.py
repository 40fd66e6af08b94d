"""How a job's processes come to be: their environment, and torchrun on one machine.

`hacpo-mega train|init|doctor CONFIG` outside a job starts torchrun with one process per rank of the configuration and
then runs itself inside each of them. Inside a job (torchrun, or srun with launch/env.sh) it finds RANK and goes on.
Not here: what a process does with its rank (topology.py).
"""

import os
import shutil
import subprocess
import sys
import warnings

# Set before torch, vllm or transformers are imported, and only where the user has not set them.
EVERYWHERE = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine lives in this process, beside the actor that feeds it
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CONFIGURE_LOGGING": "0",
    "HF_HUB_OFFLINE": "1",  # models are folders; a typo must not become a download on 512 nodes
    "TRANSFORMERS_OFFLINE": "1",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "CUDA_DEVICE_MAX_CONNECTIONS": "1",  # Megatron overlaps tensor-parallel communication only in this order
}
ON_CPU = {
    "TORCHDYNAMO_DISABLE": "1",  # spares an 18 s compilation on the first answer
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB; the default takes half of the machine, per engine
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # else every engine of a machine pins itself to the same cores
}


def prepare_environment() -> None:
    """Sets the variables above where they are not set. Must run before any heavy import."""
    for name, value in {**EVERYWHERE, **({} if _has_cuda() else ON_CPU)}.items():
        os.environ.setdefault(name, value)
    # What is not installed (TransformerEngine, Apex) is a choice, and torch's renamings are Megatron's to follow.
    for module in (r"megatron\.", r"torch\.distributed"):
        warnings.filterwarnings("ignore", category=Warning, module=module)


def _has_cuda() -> bool:
    """Whether this machine has an NVIDIA driver, asked without importing torch."""
    return os.path.exists("/dev/nvidia0") or shutil.which("nvidia-smi") is not None


def inside_a_job() -> bool:
    """Whether this process is one rank of a job."""
    return "RANK" in os.environ


def run_on_this_machine(arguments: list[str], world_size: int) -> int:
    """Runs `hacpo-mega ARGUMENTS` in `world_size` processes here and returns the exit code of the job.

    torchrun picks a free port, so that two jobs on one machine do not meet, and ends all ranks when one dies.
    """
    threads = max(1, (os.cpu_count() or 1) // world_size)
    os.environ.setdefault("OMP_NUM_THREADS", str(threads))
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes=1", f"--nproc-per-node={world_size}"]
    command += ["--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0", "--local-addr=127.0.0.1"]
    return subprocess.call([*command, "-m", "hacpo_mega.cli", *arguments])
