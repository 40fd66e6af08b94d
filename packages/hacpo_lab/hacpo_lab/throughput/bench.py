"""The benchmark: every block in turn, several rounds of it, so that whatever else the machine does hits all alike.

A block is a run of some steps in a folder of its own under `work`; its ranks are forked from one server.
Elsewhere: what a block is read as (measure.py) and how it is shown (table.py).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from hacpo_lab.forked import JobServer
from hacpo_lab.throughput.measure import MeasuredStep, measured_steps
from hacpo_lab.throughput.workload import Workload
from hacpo_mega.cluster.rank_map import RankMap
from hacpo_mega.config import Config
from hacpo_mega.logbook.run.run_folder import resolved_toml
from hacpo_mega.models.files.visible import say

# The work of one rank: (configuration file, steps, workload).
TakeSteps = Callable[[str, int, Workload], None]


@dataclass(frozen=True)
class Block:
    """The things measured under a name: a configuration, and how long and how right its answers are."""

    name: str
    config: Config
    workload: Workload


@dataclass(frozen=True)
class Bench:
    """The blocks that are run, and how often.

    blocks       every configuration is load_config's result for a run of more than `num_steps` steps
    rounds       of all blocks
    num_warm_up  first steps of every block that are not counted, at least 1
    """

    blocks: Sequence[Block]
    rounds: int
    num_steps: int
    num_warm_up: int
    work: Path

    def run(self, server: JobServer, take_steps: TakeSteps) -> dict[str, list[list[MeasuredStep]]]:
        """The measured steps of every block, a list per round. RuntimeError when one fails."""
        found: dict[str, list[list[MeasuredStep]]] = {block.name: [] for block in self.blocks}
        for number in range(self.rounds):
            for place, block in enumerate(self.blocks):
                say(f"round {number + 1} of {self.rounds}: {block.name}")
                folder = self.work / f"round_{number + 1}.{place + 1}"
                found[block.name].append(self._measure(block, folder, server, take_steps))
        return found

    def _measure(self, block: Block, folder: Path, server: JobServer, take_steps: TakeSteps) -> list[MeasuredStep]:
        folder.mkdir(parents=True)
        config = block.config.model_copy(update={"run_dir": folder / "run"})
        file = folder / "config.toml"
        file.write_text(resolved_toml(config), encoding="utf-8")
        arguments = (str(file), self.num_steps, block.workload)
        statuses = server.run(RankMap.of(config).world_size, folder, take_steps, *arguments)
        if set(statuses) != {0}:
            raise RuntimeError(f"{block.name} ended with exit statuses {statuses}: {_last_words(folder)}")
        return measured_steps(config.run_dir, [agent.name for agent in config.agents], self.num_warm_up)


def _last_words(folder: Path) -> str:
    """The last lines that the ranks wrote; the folder may be a temporary one."""
    said = [file.read_text(encoding="utf-8", errors="replace").strip() for file in sorted(folder.glob("*.err"))]
    return next((words.splitlines()[-1] for words in said if words), "its ranks said nothing")
