"""The benchmark: several rounds of all blocks in turn, so that other load on the machine disturbs all alike.

A block is a run of some steps in a folder of its own under `work`; its ranks are forked from one server.
Elsewhere: the measurements of a block (measure.py), and their tables (table.py).
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
    """A named measurement: a configuration, and the lengths and rewards of its answers."""

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
        steps: dict[str, list[list[MeasuredStep]]] = {block.name: [] for block in self.blocks}
        for round_number in range(1, self.rounds + 1):
            for block_number, block in enumerate(self.blocks, 1):
                say(f"round {round_number} of {self.rounds}: {block.name}")
                folder = self.work / f"round_{round_number}.{block_number}"
                steps[block.name].append(self._measure(block, folder, server, take_steps))
        return steps

    def _measure(self, block: Block, folder: Path, server: JobServer, take_steps: TakeSteps) -> list[MeasuredStep]:
        folder.mkdir(parents=True)
        config = block.config.model_copy(update={"run_dir": folder / "run"})
        file = folder / "config.toml"
        file.write_text(resolved_toml(config), encoding="utf-8")
        num_ranks = RankMap.of(config).world_size
        statuses = server.run(num_ranks, folder, take_steps, str(file), self.num_steps, block.workload)
        if set(statuses) != {0}:
            raise RuntimeError(f"{block.name} ended with exit statuses {statuses}: {_last_line(folder)}")
        return measured_steps(config.run_dir, [agent.name for agent in config.agents], self.num_warm_up)


def _last_line(folder: Path) -> str:
    """The last line of the first rank that wrote an error, since the folder may be a temporary one."""
    errors = [file.read_text(encoding="utf-8", errors="replace").strip() for file in sorted(folder.glob("*.err"))]
    return next((text.splitlines()[-1] for text in errors if text), "its ranks said nothing")
