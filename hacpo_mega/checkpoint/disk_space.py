"""Checks of disk space for a run: before its first step, before a checkpoint and at its end.

Sizes are estimates from parameter counts until there is a checkpoint to measure. Imports no torch, so that a run that
can never be kept is refused at once. Elsewhere: what is written (checkpoint/files.py) and logs
(logbook/files/backlog.py).
"""

import math
import os
import shutil
from pathlib import Path

from hacpo_mega.checkpoint.files import committed_steps, folder_of
from hacpo_mega.config import AgentConfig, Config
from hacpo_mega.config.checks.checks import architecture_of
from hacpo_mega.models.files.weight_files import tower_tensors
from hacpo_mega.models.sharding.lora import adapter_numbers
from hacpo_mega.models.sharding.segments import all_sources

# Main weight and both moments in float32; a byte more for the index.
CHECKPOINT_BYTES_PER_PARAMETER = 13
EXPORT_BYTES_PER_PARAMETER = 4  # float32; bf16 has half
# A token's id and log-prob, in answers that are ready for the next step (rollout/ready_answers.py).
BYTES_PER_READY_TOKEN = 8
PROBE_BYTES = 1 << 12


def num_parameters(agent: AgentConfig) -> int:
    """Number of parameters of an agent's model, as its folder or its init table describes it."""
    return sum(math.prod(source.shape) for source in all_sources(architecture_of(agent)))


def num_trained(agent: AgentConfig) -> int:
    """The number of trained parameters: the model's own, or those of its adapters."""
    architecture = architecture_of(agent)
    lora = agent.adapters(architecture)
    return num_parameters(agent) if lora is None else adapter_numbers(architecture, lora)


def checkpoint_bytes(config: Config) -> int:
    """Bytes of the next checkpoint: those of the newest one, else estimated from the number of parameters.

    With rollout.one_step_off it has answers to the next step, too; the estimate takes them to be as long as allowed.
    """
    if steps := committed_steps(config.run_dir):
        newest = folder_of(config.run_dir, steps[-1])
        return sum(path.stat().st_size for path in newest.rglob("*") if path.is_file())
    num_answers = config.training.prompts_per_step * config.answers_per_prompt * len(config.agents)
    ready = num_answers * config.longest_rollout * BYTES_PER_READY_TOKEN if config.mode.one_step_off else 0
    return ready + CHECKPOINT_BYTES_PER_PARAMETER * sum(map(num_trained, config.agents))


def export_bytes(config: Config) -> int:
    """Bytes of the Hugging Face folders of all agents, adapters and vision towers beside merged weights."""
    adapters = sum(num_trained(agent) for agent in config.agents if agent.lora is not None)
    towers = (stored for agent in config.agents for stored in tower_tensors(agent.model).values())
    numbers = adapters + sum(map(num_parameters, config.agents))
    return EXPORT_BYTES_PER_PARAMETER * numbers + sum(stored.stop - stored.start for stored in towers)


def free_bytes(folder: Path) -> int:
    """Bytes that this user may still write on the disk of a folder, or of the nearest existing one above it."""
    return shutil.disk_usage(next(path for path in (folder, *folder.absolute().parents) if os.path.exists(path))).free


def require_bytes(needed: int, folder: Path) -> None:
    """OSError where the disk of a folder has less room than `needed` bytes."""
    if (free := free_bytes(folder)) < needed:
        raise OSError(f"{needed:,} bytes are needed, {free:,} are free on the disk of {folder}")


def require_room(config: Config, *, fresh: bool = False) -> None:
    """ValueError, one line with the arithmetic, when the checkpoints and exports of a run can never fit its disk.

    At its peak a run has one checkpoint more than it keeps; existing ones count, unless the run begins `fresh`.
    """
    if not (config.checkpoint.every_steps or config.checkpoint.every_minutes):
        return
    each, export = checkpoint_bytes(config), export_bytes(config)
    existing = 0 if fresh else len(committed_steps(config.run_dir))
    number = max(1, config.checkpoint.keep_last + 1 - existing)
    try:
        require_bytes(number * each + export, config.run_dir)
    except OSError as error:
        raise ValueError(
            f"run_dir: {error}: {number} checkpoints (checkpoint.keep_last + 1, less those that are there) of {each:,} "
            f"and {export:,} for the exported models. Make room, give another run_dir or a smaller checkpoint.keep_last"
        ) from error


def probe(folder: Path, name: str) -> None:
    """Writes some bytes into a folder and removes them. OSError if that fails: full, read-only, gone, over quota."""
    path = folder / f".{name}.probe"
    try:
        with path.open("wb", buffering=0) as file:
            file.write(bytes(PROBE_BYTES))
            os.fsync(file.fileno())
    finally:
        path.unlink(missing_ok=True)
