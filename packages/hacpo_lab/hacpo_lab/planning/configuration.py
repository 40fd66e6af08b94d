"""A configuration as the planner reads it: models by folder, by init table or by a public name, nothing else is there.

Not checked here: prompt files, tokenizers, weights, the run folder, all of which are on the machines that will run it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hacpo_lab.planning.cluster_file import Cluster
from hacpo_mega.config import Config
from hacpo_mega.config.checks.checks import batch_problems, named_models
from hacpo_mega.config.load import load_unchecked
from hacpo_mega.models.families.architecture import Architecture


@dataclass(frozen=True)
class Planned:
    """A configuration whose devices have the memory of the cluster's, and the model of every agent by name."""

    config: Config
    models: dict[str, Architecture]


def load_planned(file: Path, overrides: Sequence[str], cluster: Cluster) -> Planned:
    """The configuration for a cluster. ValueError with one line per problem: keys, batches, unknown models, layouts."""
    config = load_unchecked(file, tuple(overrides))
    config = config.model_copy(update={"device_memory_gib": cluster.device.memory_gib})
    problems = batch_problems(config)
    if config.placement == "shared":
        problems.append("placement: agents that take turns on devices are not planned for. Nearest: placement=split")
    if config.placement == "apart":
        problems.append(
            "placement: engines on devices of their own are not planned for. `check` says what both kinds of device "
            "hold; the plan of placement=split has the seconds of roll_out, which engines of as many devices take, "
            "beside those of the rest, which the others do: one step off, the longer of both is a step. Nearest: "
            "placement=split"
        )
    if config.rollout.one_step_off:
        problems.append("rollout.one_step_off: steps that overlap are not planned for. Nearest: one_step_off=false")
    models, wrong = named_models(config)
    if problems := [*problems, *wrong]:
        raise ValueError("\n".join(f"{file}: {problem}" for problem in problems))
    return Planned(config, models)
