"""The schedules of a benchmark: the configuration's own method, and each agent alone with as many or twice the answers.

    its own method   the configuration as it is: N agents, G answers each, all of them shared
    in turns         the same, one agent after the other, each on the devices of all: the authors' recipe
    gspo_x2          each agent alone, 2 G answers: with two agents as many trained answers per learner
    gspo             each agent alone, G answers

An update has as many answers under all: agents alone take N times the prompts. All but `in turns` run the agents at the
same time, each on its own devices. measure.py also estimates, from the phases of a schedule, the seconds of the agents
in turns on devices that make none of them faster.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from hacpo_lab.throughput.bench import Block
from hacpo_lab.throughput.workload import Workload
from hacpo_mega.cluster.rank_map import RankMap
from hacpo_mega.config import Config, load_config
from hacpo_mega.config.tables.methods import METHODS

# Only the steps are measured: no evaluation, no checkpoint.
STEPS_ONLY = ("evaluation.every_steps=0", "checkpoint.every_steps=0", "checkpoint.every_minutes=0.0")


IN_TURNS = "in turns"


@dataclass(frozen=True)
class Schedule:
    """A way to train the agents: its name and what it changes in the configuration."""

    name: str
    overrides: tuple[str, ...] = ()


def with_and_without(config: Config, workload: Workload, unmixed: float) -> list[Block]:
    """The configuration's own method with all prompts trained, and with a share that nobody can learn from.

    Answers are as many and as long in both: the second shows the saving of leaving out rows of zero advantage.
    ValueError for a share that leaves nothing to train, or nothing out.
    """
    num_unmixed = int(config.training.prompts_per_step * unmixed)
    if not 0 < num_unmixed < config.training.prompts_per_step:
        raise ValueError(
            f"--unmixed ({unmixed:g}) of training.prompts_per_step ({config.training.prompts_per_step}) is "
            f"{num_unmixed} prompts: it must leave some out and some to train, as 0.5 does"
        )
    name = config.algorithm.method
    return [
        Block(name, config, workload),
        Block(f"{name}, {unmixed:.0%} unmixed", config, replace(workload, unmixed=unmixed)),
    ]


def schedules_of(config: Config) -> tuple[Schedule, ...]:
    """The schedules that a configuration is compared under. ValueError for one whose agents share nothing."""
    if len(config.agents) < 2 or not config.algorithm.shares_answers:
        raise ValueError(
            f"bench compares a method that shares answers with agents alone; found algorithm.method="
            f"{config.algorithm.method} with {len(config.agents)} agents: give two agents and a method such as hacpo"
        )
    alone = f"training.prompts_per_update={len(config.agents) * config.training.prompts_per_update}"
    in_turns = () if config.placement != "split" else (Schedule(IN_TURNS, _in_turns(config)),)
    return (
        Schedule(config.algorithm.method),
        *in_turns,
        Schedule("gspo_x2", ("algorithm.method=gspo_x2", alone)),
        Schedule("gspo", ("algorithm.method=gspo", alone)),
    )


def _in_turns(config: Config) -> tuple[str, ...]:
    """Overrides that give every agent the devices of all: as many cells as fit and divide an update's prompts."""
    ranks, updates = RankMap.of(config), METHODS[config.algorithm.method].updates
    cells = []
    for shape in ranks.agents:
        of_lane = config.training.prompts_per_update // (config.lanes * updates)
        most = ranks.num_devices // (config.lanes * shape.cell_size)
        number = max(number for number in range(1, most + 1) if of_lane % number == 0)
        cells.append(f"agents.{shape.name}.cells_per_lane={number}")
    return ("placement=shared", *cells)


def load_schedule(file: Path, overrides: Sequence[str], schedule: Schedule, run_dir: Path, num_steps: int) -> Config:
    """The configuration under a schedule, for a run of `num_steps` steps. ValueError with one line per problem."""
    for_bench = (*STEPS_ONLY, f"run_dir={run_dir}", f"num_steps={num_steps + 1}")
    try:
        return load_config(file, [*overrides, *schedule.overrides, *for_bench])
    except ValueError as error:
        raise ValueError(f"under {schedule.name}: {error}") from error
