"""An agent on a rank that only generates (placement = "apart"): an engine, and no actor.

It gets the same requests as the training ranks of its cell, and receives their weights. It takes no part in learning,
checkpoints and export: its answers depend on the run's seed and its weights alone.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from hacpo_mega.agent.devices import ApartDevices
from hacpo_mega.agent.rollout_client import RolloutClient, load_engine
from hacpo_mega.agent.sampler import Sampler
from hacpo_mega.agent.weight_sync import WeightSync
from hacpo_mega.cluster.machine.device import actor_dtype
from hacpo_mega.cluster.place import Place
from hacpo_mega.cluster.turns import agents_per_device, in_turn, require_host_memory
from hacpo_mega.config import AgentConfig, Config


class RolloutWorker(RolloutClient):
    """The agent whose engine this rank belongs to."""

    backend_summary = ""  # this rank has no actor

    def __init__(
        self, spec: AgentConfig, place: Place, config: Config, step: int, *, sampler: Callable[..., Sampler] = Sampler
    ) -> None:
        """Starts the engine and syncs the actor's weights after `step`. Collective as `Agent`."""
        super().__init__(spec, place, config, sampler)
        require_host_memory(place, 0)
        agents_on_device = agents_per_device(place)
        self.dtype = actor_dtype(place.device)
        with in_turn(place, agents_on_device > 1):
            self.engine = load_engine(spec, place, config, self.dtype, self.codec.ends, agents_on_device)
            with place.spans.span("weights"):
                self.weight_sync = WeightSync(place, None, self.engine)
                self.devices = ApartDevices(place, None, self.engine, self.weight_sync)
                self.publish_weights(step)

    def save(self, _folder: Path, *, copies: bool) -> tuple[dict[str, int | str], Callable[[], None]]:
        """Saves nothing: this rank has no state of the run."""
        return {}, _nothing

    def not_finite(self) -> str | None:
        """None: this rank has no state of the run."""
        return None

    def export(self, _folder: Path) -> None:
        """Exports nothing: the training ranks write the model."""


def _nothing(*_: Any) -> None:
    """Writes nothing."""
