"""The queue of an experiment: runs the missing cells, one after the other, until none is missing.

A run's ranks write into a folder of their own under work_dir/running. When the run is over its JSON file appears in
`results`, whole, and from then on the run is never made again. So a queue that is killed loses at most the run that
was going on. A run that fails is moved to work_dir/failed, and the queue goes on.
Elsewhere: which run is next (order.py), and what the results show (evidence.py).
"""

import shutil
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import tomli_w

from hacpo_lab.experiments.final_answers import final_prompts, read_final_answers
from hacpo_lab.experiments.grid import Cell, Grid, config_of_cell, overrides_of, warm_starts_of
from hacpo_lab.experiments.identity import Identity, model_digests
from hacpo_lab.experiments.order import EVERYTHING, Part, num_cells, num_done, pending_cells
from hacpo_lab.experiments.result import Measured, Result, measure, pack_results, this_machine, write_result
from hacpo_lab.experiments.trust import (
    Setting,
    check_cells,
    check_identities,
    read_results,
    require_same,
    seeds_begun_elsewhere,
)
from hacpo_lab.forked import JobServer
from hacpo_mega.cluster.rank_map import RankMap
from hacpo_mega.config import Config
from hacpo_mega.logbook.run.provenance import installed_versions, source_commit
from hacpo_mega.logbook.run.run_folder import resolved_toml
from hacpo_mega.logbook.run.run_lock import RunLock
from hacpo_mega.models.files.visible import say

PRELOAD = "hacpo_lab.preloaded"
LAST_LINES = 12  # of a failed rank's standard error

TrainRank = Callable[[str, bool], None]
WarmStartRank = Callable[[str], None]


@dataclass(frozen=True)
class Outcome:
    """The result of a queue: runs that it made, runs that failed, and those of the grid that are still missing."""

    num_made: int
    failed: tuple[Cell, ...]
    num_missing: int


def run_campaign(
    grid: Grid,
    train_rank: TrainRank,
    warm_start_rank: WarmStartRank,
    limit: int | None = None,
    part: Part = EVERYTHING,
) -> Outcome:
    """Runs at most `limit` missing cells of this machine's part, in order.

    Each rank of a run calls `train_rank(config_file, answers_test)`, and before it `warm_start_rank(config_file)` where
    the seed's own models are missing. ValueError, before any run, for a grid or a results folder that must not be used;
    and when the source changes while the queue runs, since results are of one source.
    """
    identities = check_identities(check_cells(grid))
    commit = _source()
    with RunLock(grid.work_dir, "work_dir"):
        for leftover in (grid.work_dir / "running").glob("*"):
            shutil.rmtree(leftover, ignore_errors=True)
        if "+" in commit:
            say("warning: files differ from the commit; every result will say so")
        results, others = read_results(grid)
        if seeds := seeds_begun_elsewhere(grid, results, identities):
            say(f"seeds {seeds} began from other warm starts than those here; the tables will name both")
        if others:
            say(f"{len(others)} files of {grid.results} are of no run of this grid, such as {others[0]}: left alone")
        return Queue(grid, identities, commit, JobServer(PRELOAD), train_rank, warm_start_rank).run(limit, part)


@dataclass(frozen=True)
class Queue:
    """A queue of runs that share a grid, expected identities, a commit, a fork server, and the functions of ranks."""

    grid: Grid
    identities: Mapping[Setting, Identity]
    commit: str
    server: JobServer
    train_rank: TrainRank
    warm_start_rank: WarmStartRank

    def run(self, limit: int | None, part: Part) -> Outcome:
        """Runs cells until none is left, or `limit` have been tried."""
        failed: list[Cell] = []
        num_made = 0
        scores = self.scores(part)
        while limit is None or num_made + len(failed) < limit:
            cell = next((cell for cell in pending_cells(self.grid, scores, part) if cell not in failed), None)
            if cell is None:
                break
            start = time.monotonic()
            result = self.make(cell)
            scores = self.scores(part)
            if result is None:
                failed.append(cell)
                continue
            num_made += 1
            accuracies = ", ".join(f"{agent} {values[-1]:.3f}" for agent, values in result.curves.accuracy.items())
            progress = f"{num_done(self.grid, scores)}/{num_cells(self.grid, scores)}"
            say(f"{progress} {cell.name}: {accuracies} ({time.monotonic() - start:.0f} s)")
        num_missing = num_cells(self.grid, scores) - num_done(self.grid, scores)
        if num_made and not num_missing:  # no machine writes a result of this grid any more
            pack_results(self.grid.results, read_results(self.grid)[0].values())
        return Outcome(num_made, tuple(failed), num_missing)

    def scores(self, part: Part) -> dict[Cell, float]:
        """The scores of finished cells, read anew: files of another machine may come at any time."""
        results, _ = read_results(self.grid)
        require_same(self.grid, results, self.identities, self.commit, part)
        return {cell: result.score for cell, result in results.items()}

    def make(self, cell: Cell) -> Result | None:
        """Runs a cell and writes its result; None when it failed, in which case its folder is kept."""
        running = self.grid.work_dir / "running"
        running.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix=f"{cell.name}.", dir=running))
        config = config_of_cell(self.grid, cell, folder / "run")
        file = folder / "config.toml"
        file.write_text(resolved_toml(config), encoding="utf-8")
        say(f"{cell.name} runs; what it says goes to {folder / '0.out'}")
        job, statuses = partial(self.server.run, RankMap.of(config).world_size, folder), [0]
        if any(not (model / "config.json").is_file() for model in warm_starts_of(self.grid, cell).values()):
            statuses = job(self.warm_start_rank, str(file))
        if set(statuses) == {0}:
            statuses = job(self.train_rank, str(file), cell.stage == "reported" and bool(final_prompts(config)))
        agents = tuple(agent.name for agent in config.agents)
        is_done, every_steps = set(statuses) == {0}, config.evaluation.every_steps
        measured = measure(config.run_dir, agents, every_steps) if is_done else None
        if measured is None:
            self.keep_failed(cell, folder, statuses)
            return None
        result = self.result_of(cell, config, measured)
        write_result(self.grid.results, result)
        if self.grid.keep_runs:
            _replace(config.run_dir, self.grid.work_dir / "runs" / cell.name)
        shutil.rmtree(folder)
        return result

    def result_of(self, cell: Cell, config: Config, measured: Measured) -> Result:
        """A finished run's result. ValueError when the source is no longer the one that the queue began with."""
        if (now := _source()) != self.commit:
            raise ValueError(
                f"the source was changed while the queue ran (commit {self.commit}, now {now}): {cell.name} is not "
                "kept; go back to that commit and start again, or give another results folder"
            )
        return Result(
            regime=cell.regime,
            method=cell.method,
            learning_rate=cell.learning_rate,
            seed=cell.seed,
            stage=cell.stage,
            commit=self.commit,
            versions=installed_versions(),
            machine=this_machine(),
            config_file=str(self.grid.regimes[cell.regime].config),
            overrides=tuple(overrides_of(self.grid, cell)),
            identity=self.identities[cell.regime, cell.method].model_copy(update={"models": model_digests(config)}),
            final=read_final_answers(config.run_dir, config),
            **dict(measured),
        )

    def keep_failed(self, cell: Cell, folder: Path, statuses: list[int | None]) -> None:
        """Moves a failed run to work_dir/failed, with its statuses and the last lines that its ranks wrote."""
        kept = self.grid.work_dir / "failed" / cell.name
        _replace(folder, kept)
        failure = {}
        for rank, status in enumerate(statuses):
            errors = kept / f"{rank}.err"  # missing for a rank that ended before it could open the file
            lines = errors.read_text(encoding="utf-8", errors="replace").splitlines() if errors.exists() else []
            failure[f"rank {rank}"] = {"status": str(status), "last_lines": lines[-LAST_LINES:]}
        (kept / "failure.toml").write_text(tomli_w.dumps(failure, multiline_strings=True), encoding="utf-8")
        messages = [line for rank in failure.values() for line in rank["last_lines"] if line.strip()]
        say(f"{cell.name} FAILED, exit statuses {statuses}: {messages[-1] if messages else 'it said nothing'}")
        say(f"  kept in {kept}; the queue goes on, and the next start tries it again")


def _source() -> str:
    """The commit or, outside a checkout, the installed version."""
    return source_commit() or f"v{installed_versions().get('hacpo_mega')}"


def _replace(source: Path, target: Path) -> None:
    shutil.rmtree(target, ignore_errors=True)
    target.parent.mkdir(parents=True, exist_ok=True)
    source.rename(target)
