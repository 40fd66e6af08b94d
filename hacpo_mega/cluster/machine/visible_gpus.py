"""The GPUs of a job on this node, from nvidia-smi, which also lists those of other jobs. Imports no torch.

CUDA_VISIBLE_DEVICES names them by number, by UUID (or the beginning of one), or by a slice of one (MIG); a slice counts
as a device, and its card's memory, which others may use, says nothing of it.
"""

import re
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass

GPU_QUERY = "index,uuid,name,memory.total,memory.used,driver_version,clocks.max.sm,clocks.max.memory"
MAX_USED_SHARE = 0.1  # of a GPU's memory; a driver alone holds a few hundred MiB
ANSWER_S = 20.0
CARD = re.compile(r"GPU \d+: .*\(UUID: (?P<uuid>[\w-]+)\)")
SLICE = re.compile(r"\s+MIG (?P<profile>\S+)\s+Device\s+\d+: \(UUID: (?P<uuid>[\w/-]+)\)")


@dataclass(frozen=True)
class Gpu:
    """A device of the job: a GPU, or a MIG slice, whose size `name` then tells."""

    name: str
    driver: str
    clocks: str
    problem: str = ""


def visible_gpus(visible: str | None) -> tuple[list[Gpu], list[str]]:
    """The devices that `visible` (CUDA_VISIBLE_DEVICES) names, all if it is None, and their problems.

    Both are empty without nvidia-smi.
    """
    output = _nvidia_smi(f"--query-gpu={GPU_QUERY}", "--format=csv,noheader,nounits")
    if isinstance(output, str):
        return [], [output] if output else []
    cards = [[cell.strip() for cell in line.split(",")] for line in output]
    if visible is None:
        gpus = [_gpu_of_row(card) for card in cards]
    else:
        names = [name.strip() for name in visible.split(",") if name.strip()]
        slices = list(_slices()) if any(name.startswith("MIG-") for name in names) else []
        named = {name: _find_device(name, cards, slices) for name in names}
        gpus = [gpu for gpu in named.values() if gpu is not None]
        if unknown := [name for name, gpu in named.items() if gpu is None]:
            return gpus, [f"CUDA_VISIBLE_DEVICES names {', '.join(unknown)}, which nvidia-smi does not list"]
    return gpus, [gpu.problem for gpu in gpus if gpu.problem]


def _find_device(name: str, cards: Sequence[Sequence[str]], slices: Sequence[tuple[str, str, str]]) -> Gpu | None:
    """The device of one entry of CUDA_VISIBLE_DEVICES; None if there is none."""
    if name.startswith("MIG-"):
        for uuid, profile, card in slices:
            # Older drivers name a slice by its card: MIG-GPU-<uuid>/instance/instance.
            if uuid == name or uuid.removeprefix("MIG-").startswith(name.removeprefix("MIG-")):
                _, _, model, _, _, driver, *clocks = next(row for row in cards if row[1] == card)
                return Gpu(f"{model} MIG {profile}", driver, " / ".join(clocks))
        return None
    found = [card for card in cards if card[0] == name or (name.startswith("GPU-") and card[1].startswith(name))]
    return _gpu_of_row(found[0]) if found else None


def _gpu_of_row(card: Sequence[str]) -> Gpu:
    index, _, name, total, used, driver, *clocks = card
    problem = ""
    with suppress(ValueError):  # "[N/A]" where a device does not tell
        if int(used) > MAX_USED_SHARE * int(total):
            problem = f"GPU {index}: {used} of {total} MiB are in use by another process"
    return Gpu(f"{name} with {total} MiB", driver, " / ".join(clocks), problem)


def _slices() -> Iterator[tuple[str, str, str]]:
    """(UUID, profile, its card's UUID) of every slice."""
    card = ""
    output = _nvidia_smi("-L")
    for line in output if isinstance(output, list) else ():
        if found := CARD.match(line):
            card = found["uuid"]
        elif found := SLICE.match(line):
            yield found["uuid"], found["profile"], card


def _nvidia_smi(*options: str) -> list[str] | str:
    """The lines that nvidia-smi prints; or its error, "" if there is no nvidia-smi."""
    try:
        done = subprocess.run(["nvidia-smi", *options], capture_output=True, text=True, timeout=ANSWER_S)
    except FileNotFoundError:
        return ""
    except subprocess.TimeoutExpired:
        return "nvidia-smi does not answer: the driver or a GPU hangs"
    if done.returncode:
        return f"nvidia-smi fails: {((done.stdout + done.stderr).strip().splitlines() or ['no word'])[0]}"
    return done.stdout.splitlines()
