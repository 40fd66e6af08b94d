"""Environment variables of a job's processes, and whether this process is one of them.

`hacpo-mega train|init|doctor CONFIG` outside a job starts one (jobs/local.py) and runs itself in every rank; inside one
(torchrun or srun) it runs at once. Imports nothing heavy: its variables must be set before torch and vllm are imported.
"""

import codecs
import ctypes
import fcntl
import locale
import logging
import netrc
import os
import re
import shutil
import signal
import socket
import struct
import subprocess
import sys
import sysconfig
import time
import warnings
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

from hacpo_mega.cluster.launcher_env import (
    RANK_VARIABLES,
    expand_nodes,
    from_launcher,
    is_on_one_machine,
    node_list,
    number_of,
    tasks_of_nodes,
)
from hacpo_mega.cluster.machine.machine_limits import num_cores, num_threads, stay_near_gpu
from hacpo_mega.cluster.security.private_folder import folder_on_node, own_folder
from hacpo_mega.models.files.documents import short

# Set before torch, vllm or transformers are imported, and only where the user has not set them.
EVERYWHERE = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine lives in this process, beside the actor that feeds it
    "VLLM_ALLOW_INSECURE_SERIALIZATION": "0",  # nothing is sent as a pickle, nor as a function to be run
    "VLLM_NO_USAGE_STATS": "1",
    "NO_VCS_VERSION": "1",  # Megatron would run git beside its files, and take a commit found there for its own
    "TORCH_CPP_LOG_LEVEL": "ERROR",
    "HF_HUB_OFFLINE": "1",  # models are folders; a typo must not become a download on 512 nodes
    "TRANSFORMERS_OFFLINE": "1",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "TQDM_DISABLE": "1",  # bars of vLLM's graphs and of transformers' files would break the lines of the console
    "TOKENIZERS_PARALLELISM": "false",
    # Python's tracker frees the shared memory of vLLM when a process was told to end, and complains of having to.
    "PYTHONWARNINGS": "ignore:resource_tracker",
    "TORCH_GLOO_LAZY_INIT": "1",  # connect only pairs that talk: 1000 ranks would need a million sockets
}
ON_CPU = {
    "VLLM_LOGGING_LEVEL": "ERROR",  # it warns of every CUDA feature that a CPU lacks
    "TORCHDYNAMO_DISABLE": "1",  # spares an 18 s compilation on the first answer
    # oneDNN, and torch for it, cache primitives for the last so many shapes of products, .3 MB each. Every micro-batch
    # has other shapes, some 20 of them. The default of 1024 entries takes several hundred MB.
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "64",
    "LRU_CACHE_CAPACITY": "64",
}
ON_CUDA = {
    "CUDA_DEVICE_ORDER": "PCI_BUS_ID",  # the numbers that nvidia-smi and Slurm give, on nodes of unequal GPUs, too
    "VLLM_LOGGING_LEVEL": "WARNING",  # its warnings explain a slow or a failed start
    "FLASHINFER_LOGGING_LEVEL": "warning",
    # Else vLLM would use another all-reduce where nvcc and ninja are on PATH, and compile it at the start.
    "VLLM_ALLREDUCE_USE_FLASHINFER": "0",
    # It takes no request with a seed, which all of ours have: loading it would only cost time.
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
}
# Warnings of vLLM, by logger, that every start of an engine in this process gives and that ask for nothing.
EXPECTED = {
    "vllm.engine.arg_utils": "The global random seed is set",
    "vllm.utils.torch_utils": "OMP_NUM_THREADS=",
    "vllm.renderers.base": "Using None for EOS token id",
}
# Compiled code, of Triton, vLLM and torch, each in a folder of own_caches. torch makes its own when it is imported, and
# loads what it finds there: else under a name in the temporary folder that anybody can take. vLLM's code names its
# device by number and lies under the rank in the agent, whose device is another one with another layout or placement.
INDUCTOR = "TORCHINDUCTOR_CACHE_DIR"
CACHES = {"TRITON_CACHE_DIR": "triton", "VLLM_CACHE_ROOT": "vllm/{device}", INDUCTOR: "inductor"}
# Where nvcc and ninja are on PATH vLLM imports FlashInfer on Hopper and later, and that makes a folder in the home.
# A user may have fetched kernels to there, so the folder moves only where that fails.
FLASHINFER = "FLASHINFER_WORKSPACE_BASE"

# Variables that a cluster may have to change; rank 0 of a Slurm job prints those that are set.
SHOWN = re.compile(r"(MASTER|NCCL|TORCH_NCCL|GLOO|UCX|FI|OMP|CUDA|PYTORCH)_\w+")
NODE_LISTS = ("SLURM_JOB_NODELIST_HET_GROUP_0", "SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST")  # the best one first
OF_CLUSTER = ("SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_CLUSTERS", "SLURM_JWT")  # Slurm's programs need them anywhere
DEVICES = Path("/dev")
SIOCGIFADDR = 0x8915  # the IPv4 address of an interface, in Linux

PR_SET_PDEATHSIG = 1  # a signal to this process when its parent ends, in Linux
ENDS_NOTED = "HACPO_MEGA_ENDS_NOTED"  # set by launch/slurm.sbatch, which writes how each of its attempts ends
LAUNCHER_PID = "HACPO_MEGA_LAUNCHER_PID"  # set by jobs/local.py for the ranks it starts


def prepare_environment() -> None:
    """Sets the variables above where they are not set. Must run before any heavy import.

    ValueError for a value that libraries would not understand and silently ignore.
    """
    _require_sound_variables()
    under_srun = {}
    if _is_slurm_task():
        if _has_cuda():
            stay_near_gpu(os.environ)
        under_srun = from_slurm(os.environ, num_cores())
    for name, value in {**library_settings(on_cuda=_has_cuda()), **under_srun}.items():
        os.environ.setdefault(name, value)
    os.environ.setdefault(INDUCTOR, _inductor_folder())
    if inside_a_job() and (interface := _interface_of_job()):
        # Else a node whose name resolves to loopback would wait there for the other nodes, and a job on one machine
        # would listen to the network.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        os.environ.setdefault("NCCL_SOCKET_IFNAME", interface)
    # vLLM reads its level only after its first module has warned.
    logging.getLogger("vllm").setLevel(os.environ["VLLM_LOGGING_LEVEL"].upper())
    for name in EXPECTED:
        logging.getLogger(name).addFilter(_is_unexpected)
    # Megatron's deprecations (GPTModel) and hints are for its developers; errors stay.
    logging.getLogger("megatron").setLevel(logging.ERROR)
    # Missing packages (TransformerEngine, Apex) are a choice, and Megatron must follow torch's renamings, not the user.
    for module in (r"megatron\.", r"torch\.distributed"):
        warnings.filterwarnings("ignore", category=Warning, module=module)


def _is_unexpected(record: logging.LogRecord) -> bool:
    return not str(record.msg).startswith(EXPECTED[record.name])


def _require_sound_variables() -> None:
    threads, level = os.environ.get("OMP_NUM_THREADS"), os.environ.get("VLLM_LOGGING_LEVEL")
    if threads is not None and not re.fullmatch("0*[1-9][0-9]{0,4}", threads):
        raise ValueError(
            f"OMP_NUM_THREADS must be the threads of a process, a number from 1 on, found {short(threads)}; without it "
            "the processes of a machine share its cores"
        )
    if level is not None and level.upper() not in logging.getLevelNamesMapping():
        known = ", ".join(name for name in logging.getLevelNamesMapping() if name != "NOTSET")
        raise ValueError(f"VLLM_LOGGING_LEVEL must be one of {known}, found {short(level)}")
    if sys.flags.optimize:
        raise ValueError("Python leaves asserts out here, without which vLLM never answers: unset PYTHONOPTIMIZE (-O)")
    if codecs.lookup(locale.getpreferredencoding(False)).name == "ascii":
        raise ValueError(
            "Python reads files as ASCII here, and some of torch's are UTF-8: unset PYTHONUTF8, or set LC_ALL=C.UTF-8"
        )


def library_settings(*, on_cuda: bool) -> dict[str, str]:
    """Environment variables for torch, vLLM and transformers on a machine with or without an NVIDIA driver."""
    return EVERYWHERE | (ON_CUDA if on_cuda else ON_CPU)


def _inductor_folder() -> str:
    """Torch's cache folder until own_caches chooses one; it stays empty if nothing is compiled."""
    with suppress(ValueError, OSError):
        folder = own_folder() / CACHES[INDUCTOR]
        folder.mkdir(exist_ok=True)
        return str(folder)
    return os.sep  # torch asks for a folder that is there


def own_caches(agent: str, device: int) -> None:
    """On CUDA, gives an agent's process with this device on its node a cache folder of its own for compiled code.

    On the node, because a home on the network is slow to compile in and is written by all nodes at once; the agent's,
    because vLLM's names do not tell two agents of one model apart. Under the temporary folder (TMPDIR), kept for the
    next run. A variable that the user has set stays. Libraries read them when they compile, so they may be set after
    the imports. ValueError where no folder is the user's own: another user's code would run here.
    """
    if not _has_cuda():
        return
    if os.environ.get(INDUCTOR) == _inductor_folder():
        del os.environ[INDUCTOR]
    missing = [name for name in CACHES if name not in os.environ]
    folder = folder_on_node() if missing else Path()
    for name in missing:
        os.environ[name] = str(folder / agent / CACHES[name].format(device=device))
    if FLASHINFER not in os.environ and not _home_takes_folders():
        os.environ[FLASHINFER] = str(folder_on_node() / agent / "flashinfer")


def _home_takes_folders() -> bool:
    """False where the home is read only, as a container may have it, or is another user's."""
    cache = Path(os.path.expanduser("~/.cache"))
    found = next(folder for folder in (cache, *cache.parents) if os.path.exists(folder))
    return found.is_dir() and os.access(found, os.W_OK)


def one_queue(tp: int) -> None:
    """On CUDA, gives this process one queue to its device where its agent has `tp` > 1. Before its first CUDA context.

    Megatron issues a tensor-parallel collective and then the matrix product that hides it, and needs the device to
    start them in that order (its layers say so): one queue ensures it. One queue also serialises everything else in the
    process, so it is set for tensor parallelism alone, and not from Blackwell on, where Megatron's own training does
    not ask for it. A variable that is already set stays.
    """
    if tp > 1 and _has_cuda() and not _is_blackwell():
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")


def _is_blackwell() -> bool:
    """True if a GPU of this machine has compute capability 10 or more; False if nvidia-smi does not tell."""
    command = ["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"]
    try:
        output = subprocess.run(command, capture_output=True, text=True, timeout=20).stdout
    except (OSError, subprocess.TimeoutExpired):  # no such command in a container, or a driver that hangs
        return False
    return any(int(line.partition(".")[0]) >= 10 for line in output.splitlines() if line[:1].isdigit())


def compiler_problems() -> list[str]:
    """Tools that Triton lacks here to compile the launcher of a kernel, which it does at run time on CUDA."""
    scheme = sysconfig.get_default_scheme()
    # As Triton: Debian's own scheme has a folder that nothing installs headers to.
    header = Path(sysconfig.get_paths("posix_prefix" if scheme == "posix_local" else scheme)["include"], "Python.h")
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
    needed = {"a C compiler (gcc, clang or CC)": compiler, f"{header} (python3-dev)": header.is_file()}
    return [f"Triton needs {name} at run time, and there is none" for name, found in needed.items() if not found]


def compiles() -> bool:
    """True if torch's compiler is on in this process."""
    return os.environ.get("TORCHDYNAMO_DISABLE") != "1"


def may_fork_ranks() -> bool:
    """True if ranks may be forked from a process that has imported all they need.

    Not with an NVIDIA driver: a child cannot use CUDA after a library has initialised it at its import.
    """
    return not _has_cuda()


def shows_gpus() -> bool:
    """True if the kernel shows a GPU of NVIDIA here; a container that has one of several may begin at any number."""
    return any(DEVICES.glob("nvidia[0-9]*"))


def _has_cuda() -> bool:
    """True if this machine has an NVIDIA driver; does not import torch."""
    return shows_gpus() or shutil.which("nvidia-smi") is not None


def from_slurm(task: Mapping[str, str], allowed: int) -> dict[str, str]:
    """Variables that a launcher sets and srun does not, from those of a Slurm task; it may use `allowed` cores.

    Rank 0 is on the first node of component 0 of a heterogeneous job; the node list of its tasks is the sorted union.
    """
    needed = ("SLURM_JOB_ID", "SLURM_TASKS_PER_NODE", "SLURM_NODEID")
    nodes = next((task[name] for name in NODE_LISTS if name in task), None)
    given = {name: task.get(name) for name in needed} | {NODE_LISTS[-1]: nodes}
    if missing := [name for name, value in given.items() if value is None]:
        raise ValueError(
            f"SLURM_PROCID is set, and {', '.join(missing)} not, which srun sets for its tasks: start with srun, or "
            "unset SLURM_PROCID to start here"
        )
    job, step = (number_of(name, task.get(name, "0"), 2**32 - 1) for name in ("SLURM_JOB_ID", "SLURM_STEP_ID"))
    # Below the kernel's ephemeral ports; another one for every step of a job.
    port = 10_000 + (job * 8 + step) % 20_000
    counts, node = tasks_of_nodes(task["SLURM_TASKS_PER_NODE"]), number_of("SLURM_NODEID", task["SLURM_NODEID"])
    if node >= len(counts):
        raise ValueError(
            f"SLURM_NODEID is {node}, and SLURM_TASKS_PER_NODE ({short(task['SLURM_TASKS_PER_NODE'])}) is of "
            f"{len(counts)} nodes: start with srun, which sets both"
        )
    num_local = counts[node]
    threads = num_threads(task, num_local, allowed)
    return {"MASTER_ADDR": expand_nodes(nodes)[0], "MASTER_PORT": str(port), "OMP_NUM_THREADS": str(threads)}


def _interface_of_job() -> str | None:
    host = os.environ.get("MASTER_ADDR", "localhost")
    if is_on_one_machine() or host == "localhost" or host.startswith("127."):
        return "lo"
    interface = _interface_towards(host)
    if interface is None:  # the first node's name may resolve to loopback on itself, another node's does not
        own = (host, os.environ.get("SLURMD_NODENAME"))
        other = next((node for node in expand_nodes(node_list()) if node not in own), host)
        with suppress(ValueError):  # a name that Slurm alone knows
            interface = _interface_towards(other)
    return interface


def cores_of_a_process(num_local: int) -> int:
    """Processors that each of this node's processes has to itself."""
    return num_threads(os.environ if _is_slurm_task() else {}, num_local, num_cores())


def num_threads_set() -> int:
    """Number of threads that this process was given to compute with; 0 if none was set."""
    given = os.environ.get("OMP_NUM_THREADS", "")
    return int(given) if given.isdigit() else 0


def visible_devices() -> str | None:
    """The GPUs that this process is shown, as CUDA reads the variable; None: all."""
    return os.environ.get("CUDA_VISIBLE_DEVICES")


def _interface_towards(host: str) -> str | None:
    """The network interface on the way to a host; None where it is loopback, or has no IPv4 address.

    ValueError when the host's name cannot be resolved.
    """
    try:
        family, kind, *_, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    except OSError as error:
        raise ValueError(f"MASTER_ADDR {host}: {error.strerror}; give an address of the job's first node") from error
    with socket.socket(family, kind) as probe:
        probe.connect(address)  # sends nothing
        own = probe.getsockname()[0]
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(probe, SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            except OSError:
                continue
            if socket.inet_ntoa(answer[20:24]) == own:
                return None if own.startswith("127.") else name
    return None


def has_tracker_login() -> bool:
    """True if wandb would start without asking for a key: it is offline, or has one in a variable or a netrc file."""
    if os.environ.get("WANDB_MODE") in ("offline", "disabled", "dryrun") or os.environ.get("WANDB_API_KEY"):
        return True
    host = urlsplit(os.environ.get("WANDB_BASE_URL") or "https://api.wandb.ai").hostname
    for file in filter(None, (os.environ.get("NETRC"), "~/.netrc", "~/_netrc")):
        with suppress(OSError, netrc.NetrcParseError, UnicodeDecodeError):
            if netrc.netrc(os.path.expanduser(file)).authenticators(host or ""):
                return True
    return False


def shown_environment() -> str:
    """The variables that decide how this process reaches the others, and how many threads it has, as one line."""
    return " ".join(f"{name}={value}" for name, value in sorted(os.environ.items()) if SHOWN.fullmatch(name))


def attempt_of_job() -> tuple[str, int] | None:
    """The job of this process and its attempt, from 1 on; None if its launcher restarts no jobs.

    The same before and after Place.join, which sets RANK.
    """
    if _variable("TORCHELASTIC_MAX_RESTARTS"):
        restarts = _variable("TORCHELASTIC_RESTART_COUNT")
        return f"torchrun {os.environ['TORCHELASTIC_RUN_ID']}", 1 + restarts
    if job := _slurm_job():
        return f"slurm {job}", 1 + _variable("SLURM_RESTART_COUNT")
    return None


def _slurm_job() -> str | None:
    """The number of the Slurm job to which this process's script or step belongs, whoever started it there.

    The shell of salloc is on another machine: it has the job's variables and no SLURM_PROCID.
    """
    return os.environ.get("SLURM_JOB_ID") if "SLURM_PROCID" in os.environ else None


def outside_of_jobs() -> dict[str, str]:
    """The environment without that of a job that this process belongs to, a shell of salloc or srun, say.

    sbatch would pass it to the new job, where srun refuses two kinds of memory limits, or takes counts as requests.
    """
    if "SLURM_JOB_ID" not in os.environ:
        return dict(os.environ)
    return {name: value for name, value in os.environ.items() if not name.startswith("SLURM_") or name in OF_CLUSTER}


def ends_are_noted() -> bool:
    """True if the job script that started this process records how an attempt ends, unless Slurm ends it."""
    return ENDS_NOTED in os.environ


def place_in_cluster() -> dict[str, str]:
    """The job and the nodes that a start is traced to; empty where no cluster started this process."""
    if job := _slurm_job():
        return {"job": f"slurm {job}", "nodes": node_list()}
    found = attempt_of_job()
    return {} if found is None else {"job": found[0]}


def user_cache() -> Path:
    """The folder of this user's caches. FileNotFoundError for a user without a home."""
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError as error:
        raise FileNotFoundError(str(error)) from error


def end_with_launcher() -> None:
    """Ends this process when the local job that started it is gone: a killed launcher cannot end its ranks.

    Ctrl-C also ends it, at once and without a traceback, until watchdog.py handles signals.
    """
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    launcher = os.environ.get(LAUNCHER_PID)
    if launcher is not None:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != int(launcher):  # it was gone before
            os._exit(1)


class ElapsedTime(NamedTuple):
    """Seconds of the clock, and of processors."""

    clock_s: float
    processor_s: float


def used_since_begin() -> ElapsedTime:
    """Seconds since this process's command began, and processor seconds that it and its local launcher have used."""
    launcher = int(os.environ.get(LAUNCHER_PID, os.getpid()))
    fields = _process_stat(launcher)
    # utime, stime, starttime
    user, system, began = (int(fields[index]) / os.sysconf("SC_CLK_TCK") for index in (11, 12, 19))
    own = 0.0 if launcher == os.getpid() else time.process_time()
    return ElapsedTime(time.clock_gettime(time.CLOCK_BOOTTIME) - began, user + system + own)


def process_start(process: int) -> str | None:
    """Start of a process, in ticks since the boot; None for one that has ended, even if unreaped."""
    with suppress(OSError):
        fields = _process_stat(process)
        return None if fields[0] in "ZX" else fields[19]
    return None


def _process_stat(process: int) -> list[str]:
    """Fields of /proc/<process>/stat (proc(5)) from the state on. OSError for one that is gone."""
    return Path(f"/proc/{process}/stat").read_text(errors="replace").rpartition(")")[2].split()


def _is_slurm_task() -> bool:
    """True if srun started this process, with no other launcher below it that sets RANK."""
    return "SLURM_PROCID" in os.environ and "RANK" not in os.environ


def is_first_of_the_job() -> bool:
    """True if this process is rank 0 of its job, or outside a job."""
    return _variable("RANK", "SLURM_PROCID") == 0


def inside_a_job() -> bool:
    """True if this process is one rank of a job."""
    return "RANK" in os.environ or "SLURM_PROCID" in os.environ


def is_first_of_its_node() -> bool:
    """True if this process reports for its node, or is outside a job."""
    return _variable("LOCAL_RANK", "SLURM_LOCALID") == 0


def _variable(*names: str) -> int:
    """The number in the first of these variables that is set; 0 if none is. ValueError if it is no number."""
    name = next((name for name in names if os.environ.get(name)), None)
    return 0 if name is None else number_of(name, os.environ[name])


def reads_first() -> bool:
    """True if this process is the first of its node to read files: a local launcher reads before its ranks."""
    return is_first_of_its_node() and LAUNCHER_PID not in os.environ


def job_size() -> int:
    """Number of processes of this process's job, by its launcher; ValueError if the launcher does not say."""
    return from_launcher(*RANK_VARIABLES[1])
