"""An actor's state on disk: float32 main weights and both moments of Adam.

Every rank writes what it owns, once, as rectangles of the Hugging Face tensors (stored_state.py); nothing is gathered.
So a checkpoint loads into any tp, pp, number of cells and padding of the vocabulary. Megatron's own formats cannot:
"dp_reshardable" is bound to tp and pp, "fully_reshardable" gathers the whole state on every data-parallel rank.
With LoRA only the adapters' state is stored; the model itself is in its folder, as the run began with it.
Not stored, since it can be derived: the model's own weights (the main weights, rounded), the rows that pad a vocabulary
(zero), a tied head on another stage (the embedding), gradients (a step begins without), the learning rate (from the
number of updates), the reference policy (the model folder).

Elsewhere: which steps are kept, and that a step exists for all agents or for none (checkpoint/files.py).
"""

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel

from hacpo_mega.megatron.checkpoint.stored_state import (
    KINDS,
    WEIGHT,
    Part,
    Parts,
    StateReader,
    stored_name,
    write_parts,
)
from hacpo_mega.megatron.model.model import HiddenStateModel, unwrapped
from hacpo_mega.megatron.model.platform import megatron_platform
from hacpo_mega.megatron.train.optimizer import ActorOptimizer, ParameterShare
from hacpo_mega.megatron.weights.hf_reader import FolderReader
from hacpo_mega.megatron.weights.names import shard_coordinates, sources_of, trained_slots
from hacpo_mega.models.sharding.segments import Cut, Slot, rectangles


@torch.no_grad()
def save_state(
    model: DistributedDataParallel, optimizer: ActorOptimizer, folder: Path, group: dist.ProcessGroup, *, copies: bool
) -> Callable[[], None]:
    """Returns a function that writes the actor's present state into an empty folder, synced to disk.

    Every rank must see the folder.

    group    gloo group of the agent, for the save alone
    copies   whether the actor may change before it is written, at the cost of a copy of its state in host memory

    All ranks of the agent call the function once, in any thread. NotWritten if a rank cannot write its share; the actor
    stays unchanged. docs/design/checkpoints.md says why Megatron's writers are not used.
    """
    with megatron_platform():
        optimizer.make_moments()
    parts = _parts(unwrapped(model), optimizer, written=True)
    if copies:
        parts = {name: [part.on_host() for part in own] for name, own in parts.items()}
    if not torch.cuda.is_available():
        return partial(write_parts, parts, folder, group)
    # The writing thread uses another stream, which is not ordered behind this one.
    torch.cuda.current_stream().synchronize()
    return partial(_write, parts, folder, group, torch.cuda.current_device())


@torch.no_grad()
def not_finite(model: DistributedDataParallel, optimizer: ActorOptimizer) -> str | None:
    """First tensor that `save_state` would write here and that holds NaN or infinity, by its stored name."""
    with megatron_platform():
        optimizer.make_moments()
    parts = _parts(unwrapped(model), optimizer, written=True)
    return next((name for name, own in parts.items() if not all(part.data.isfinite().all() for part in own)), None)


def _write(parts: Parts, folder: Path, group: dist.ProcessGroup, device: int) -> None:
    torch.cuda.set_device(device)  # a thread begins on device 0, which is another rank's
    write_parts(parts, folder, group)


@torch.no_grad()
def load_state(
    model: DistributedDataParallel, optimizer: ActorOptimizer, folder: Path, *, num_updates: int, num_applied: int
) -> None:
    """Restores the actor from `folder`, to the last bit. Collective over the agent.

    num_updates   updates of the run so far, which set the learning rate
    num_applied   updates that were applied: Adam's step
    """
    with megatron_platform():
        optimizer.make_moments()
    optimizer.offload.ensure_on_device()
    StateReader(folder).read(_parts(unwrapped(model), optimizer, written=False))
    with megatron_platform():
        optimizer.spread_main_weights(model)
    optimizer.set_progress(num_updates, num_applied)


@torch.no_grad()
def read_main_weights(model: DistributedDataParallel, optimizer: ActorOptimizer, folder: Path) -> None:
    """Reads the float32 tensors of a model folder into the main weights, which were made of the rounded weights.

    Every rank reads its share. Rounding them gives the weights that the model has. Frozen weights stay rounded.
    """
    bare = unwrapped(model)
    if bare.config.params_dtype is torch.float32 or bare.lora is not None:
        return
    with ExitStack() as stack:
        reader = FolderReader(folder, stack)
        parts = _parts(bare, optimizer, written=False)
        for source in sources_of(bare):
            if reader.stored[source.name].dtype != "F32":
                continue
            for part in parts.get(stored_name(WEIGHT, source.name), ()):
                rows, *columns = zip(part.offsets, part.data.shape, strict=True)
                piece = reader.read(source, rows[0], sum(rows), dim=0)
                part.data.copy_(piece.narrow(1, *columns[0]) if columns else piece)


def _parts(model: HiddenStateModel, optimizer: ActorOptimizer, *, written: bool) -> dict[str, list[Part]]:
    """This rank's share of the state, as views; `written` leaves out what another rank writes."""
    own, parts = shard_coordinates(model), defaultdict(list)
    for slot in _written_slots(model) if written else trained_slots(model, model.pg_collection.pp.rank()):
        share = _share(optimizer, model.get_parameter(slot.parameter), written=written)
        if share is None:  # other cells own all of this parameter
            continue
        for place in rectangles(slot, model.architecture, **own, start=share.start, stop=share.stop):
            first = place.start - share.start
            for kind in (kind for kind in KINDS if kind in share.state):
                data = share.state[kind].detach()[first : first + torch.Size(place.sizes).numel()].view(place.sizes)
                parts[stored_name(kind, place.source.name)].append(Part(place.source.shape, place.offsets, data))
    return parts


def _share(optimizer: ActorOptimizer, parameter: torch.nn.Parameter, *, written: bool) -> ParameterShare | None:
    """This rank's share of a parameter, offloaded or not; the first cell writes a frozen one, such as a router's bias,
    in float32 as all of the state is."""
    if parameter.requires_grad:
        return optimizer.share_of(parameter)
    if written and parallel_state.get_data_parallel_rank(with_context_parallel=True):
        return None
    whole = optimizer.weights.readable(parameter).detach().view(-1)
    return ParameterShare(0, whole.numel(), {WEIGHT: whole.float() if written else whole})


def _written_slots(model: HiddenStateModel) -> Iterator[Slot]:
    """Slots that this rank writes: not copies of an earlier stage's or another tensor rank's slots."""
    stage = model.pg_collection.pp.rank()
    earlier = {source for before in range(stage) for slot in trained_slots(model, before) for source in slot.sources}
    for slot in trained_slots(model, stage):
        is_copy = slot.cut is Cut.WHOLE and model.pg_collection.tp.rank() > 0
        if not is_copy and earlier.isdisjoint(slot.sources):
            yield slot
