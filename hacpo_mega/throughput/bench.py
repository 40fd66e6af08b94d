"""The benchmark: every schedule in turn, several rounds of it, so that whatever else the machine does hits all alike.

A block is one schedule's run of some steps in a folder of its own under `work`; its ranks are forked from one server.
Not here: what a block is read as (measure.py) and how it is shown (table.py).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hacpo_mega.cluster.forked_job import JobServer
from hacpo_mega.cluster.rank_map import RankMap
from hacpo_mega.config import Config
from hacpo_mega.logbook.run_folder import resolved_toml
from hacpo_mega.throughput.measure import MeasuredStep, measured_steps
from hacpo_mega.throughput.schedules import Schedule

# What one rank does: (configuration file, steps).
TakeSteps = Callable[..., None]


@dataclass(frozen=True)
class Bench:
    """What is run, and how often.

    configs      by schedule: load_config's result for a block of `num_steps` steps
    rounds       of all schedules
    num_warm_up  first steps of every block that are not counted, at least 1
    """

    configs: Mapping[Schedule, Config]
    rounds: int
    num_steps: int
    num_warm_up: int
    work: Path

    def run(
        self, server: JobServer, take_steps: TakeSteps, *arguments: object
    ) -> dict[Schedule, list[list[MeasuredStep]]]:
        """The measured steps of every schedule, a list per round. RuntimeError when a block fails."""
        found: dict[Schedule, list[list[MeasuredStep]]] = {schedule: [] for schedule in self.configs}
        for number in range(self.rounds):
            for schedule, config in self.configs.items():
                print(f"round {number + 1} of {self.rounds}: {schedule.name}", flush=True)
                found[schedule].append(self._block(number, schedule, config, server, take_steps, arguments))
        return found

    def _block(
        self,
        number: int,
        schedule: Schedule,
        config: Config,
        server: JobServer,
        take_steps: TakeSteps,
        arguments: Sequence[object],
    ) -> list[MeasuredStep]:
        folder = self.work / f"round_{number + 1}.{schedule.name}"
        folder.mkdir(parents=True)
        block = config.model_copy(update={"run_dir": folder / "run"})
        file = folder / "config.toml"
        file.write_text(resolved_toml(block), encoding="utf-8")
        statuses = server.run(RankMap.of(block).world_size, folder, take_steps, str(file), self.num_steps, *arguments)
        if set(statuses) != {0}:
            raise RuntimeError(
                f"{schedule.name} ended with exit statuses {statuses}; what its ranks said: {folder}/*.err"
            )
        return measured_steps(block.run_dir, [agent.name for agent in config.agents], self.num_warm_up)
