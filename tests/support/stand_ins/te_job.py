"""Models' answers to te_stand_in.py with the stand-in's layers; see there.

Imports Megatron, so it must be imported after the stand-in is in place.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from memory_trace import _fake_world

from hacpo_mega.cluster.groups.spans import Spans
from hacpo_mega.config import OptimizerConfig
from hacpo_mega.megatron.actor import initialize_parallel
from hacpo_mega.megatron.checkpoint.sharded_state import load_state, save_state
from hacpo_mega.megatron.model.model import HiddenStateModel, build_model, forward_packed
from hacpo_mega.megatron.model.platform import megatron_platform
from hacpo_mega.megatron.train.optimizer import ActorOptimizer
from hacpo_mega.megatron.train.schedule import data_parallel
from hacpo_mega.megatron.weights.names import load_hf_weights, slots_of
from hacpo_mega.megatron.weights.reshard import full_tensors
from hacpo_mega.models.families.architecture import Architecture
from hacpo_mega.models.sharding.layout import Layout
from hacpo_mega.models.sharding.segments import shard_shape

LENGTHS = (5, 17, 1, 30)


def answer(folder: Path, made: dict[str, list[dict]]) -> None:
    """Writes FOLDER/found.pt: model -> what `_computed` and `_shapes` found, and what the layers were made with."""
    found = {}
    models = sorted((folder / "models").iterdir())
    with _alone(folder):
        for model in models:
            found[model.name] = _computed(model, folder / model.name, made)
    for model in models:
        found[model.name]["shapes"] = {
            (tp, pp, rank): _shapes(model, tp, pp, rank) for tp, pp in ((2, 1), (1, 2)) for rank in range(pp)
        }
    torch.save(found, folder / "found.pt")


def _model(folder: Path, transformer: str, tp: int = 1, pp: int = 1) -> HiddenStateModel:
    """As on CUDA, where Megatron initialises weights on the device."""
    overrides = {"use_cpu_initialization": False}
    return build_model(
        Architecture.from_folder(folder),
        tp=tp,
        pp=pp,
        dtype=torch.float32,
        max_positions=64,
        transformer=transformer,
        overrides=overrides,
    )


def _computed(folder: Path, state: Path, made: dict[str, list[dict]]) -> dict:
    made.clear()
    fused, local = _model(folder, "te"), _model(folder, "local")
    given = {name: [_plain(arguments) for arguments in calls] for name, calls in made.items()}
    for model in (fused, local):
        load_hf_weights(model, folder)
    pack = (
        torch.arange(sum(LENGTHS)) * 7 % 131,
        torch.cat([torch.arange(length) for length in LENGTHS]),
        torch.tensor([0, *LENGTHS]).cumsum(0).int(),
    )
    published = {name: tensor.clone() for name, tensor in full_tensors(fused)}
    hidden = {"te": forward_packed(fused, *pack).detach(), "local": forward_packed(local, *pack).detach()}
    return {"made": given, "published": published, "hidden": hidden, "taken up": _taken_up(folder, state)}


def _taken_up(folder: Path, state: Path) -> dict[str, torch.Tensor]:
    """The weights of a local model after it has taken up the state of one with the stand-in's layers."""
    with megatron_platform():
        fused = data_parallel(_model(folder, "te"), Spans())
        load_hf_weights(fused, folder)
        first = ActorOptimizer(fused, OptimizerConfig(), total_updates=1)
        state.mkdir()
        save_state(fused, first, state, dist.group.WORLD, copies=False)()
        local = data_parallel(_model(folder, "local"), Spans())
        second = ActorOptimizer(local, OptimizerConfig(), total_updates=1)
    load_state(local, second, state, num_updates=0, num_applied=0)
    return {name: tensor.clone() for name, tensor in full_tensors(local)}


def _shapes(folder: Path, tp: int, pp: int, pp_rank: int) -> dict:
    """Names, shapes and flags of the parameters of one rank, and what names.py says of the first two."""
    has_experts = Architecture.from_folder(folder).has_experts
    with _fake_world(Layout(tp, pp), 1, rank=pp_rank * tp, has_experts=has_experts):
        model = _model(folder, "te", tp, pp)
        parameters = dict(model.named_parameters())
        return {
            "parameters": {name: tuple(parameter.shape) for name, parameter in parameters.items()},
            "slots": {
                slot.parameter: shard_shape(slot, model.architecture, tp=tp) for slot in slots_of(model, pp_rank)
            },
            "summed over tensor ranks": {
                name for name, parameter in parameters.items() if getattr(parameter, "sequence_parallel", False)
            },
        }


def _plain(arguments: dict) -> dict:
    """The given object, without what no file can keep."""
    return {
        name: value if isinstance(value, bool | int | float | str | torch.dtype | None) else type(value).__name__
        for name, value in arguments.items()
    }


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.FileStore(str(folder / "store"), 1), rank=0, world_size=1)
    initialize_parallel(1, 1, seed=1, ep=1)
    yield
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()
