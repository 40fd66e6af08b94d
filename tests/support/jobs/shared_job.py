"""A run whose agents take turns, in which every rank notes what of its actor is on the device as things happen.

`main` on every rank writes what it noted to FOLDER/<rank>.json: (method, whether weights are there, whether gradient
buffers are), in order. A full disk refuses the first export of one agent.
"""

import errno
import json
import os
from pathlib import Path

from job import play_command

from hacpo_mega.agent.weight_sync import WeightSync
from hacpo_mega.megatron.actor import Actor
from hacpo_mega.megatron.train.optimizer import ActorOffload
from hacpo_mega.rollout.engine import Engine
from hacpo_mega.trainer import joint_disk

METHODS = {
    Engine: ("wake", "generate", "sleep"),
    WeightSync: ("publish", "differences"),
    Actor: ("score", "gradient_products", "learn", "save", "save_hf"),
}
REFUSED = "alone"


def main(config: Path, folder: Path, *overrides: str) -> None:
    """Trains `config` to its end."""
    rank, noted, buffers = os.environ["RANK"], [], []  # later on RANK counts inside the agent
    full = [OSError(errno.ENOSPC, "No space left on device")]
    joint_disk.RETRY_S = 0.1
    original_init, save_hf = ActorOffload.__init__, Actor.save_hf

    def init(whole: ActorOffload, model, optimizer) -> None:
        buffers.extend(model.buffers)
        original_init(whole, model, optimizer)

    def save_hf_on_a_full_disk(actor: Actor, out: Path, **how: object) -> None:
        if out.name == REFUSED and full:
            raise full.pop()
        save_hf(actor, out, **how)

    ActorOffload.__init__, Actor.save_hf = init, save_hf_on_a_full_disk
    for owner, names in METHODS.items():
        for name in names:
            setattr(owner, name, noting(getattr(owner, name), noted, buffers))
    play_command("train", str(config), *overrides)
    (folder / f"{rank}.json").write_text(json.dumps(noted))


def noting(original, noted: list, buffers: list):
    """A method that does what it did, and notes what is there before."""

    def method(*arguments, **options):
        weights, gradients = (
            any(getattr(buffer, part).untyped_storage().nbytes() for buffer in buffers)
            for part in ("param_data", "grad_data")
        )
        noted.append((original.__name__.removesuffix("_on_a_full_disk"), weights, gradients))
        return original(*arguments, **options)

    return method
