"""The command `hacpo-mega bench`: what a step of the configuration's method costs beside its agents alone.

Imports are inside functions, as in cli/app.py: `--help` must answer without torch, and the ranks load the trainer.
"""

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hacpo_lab.commands.ranks import bench_rank
from hacpo_mega.cli.start import ConfigFile, Overrides
from hacpo_mega.cluster.machine.environment import inside_a_job, prepare_environment
from hacpo_mega.models.files.visible import say

if TYPE_CHECKING:
    from hacpo_lab.throughput.bench import Bench, Block
    from hacpo_lab.throughput.measure import MeasuredStep
    from hacpo_lab.throughput.workload import Workload

    StepsByBlock = Mapping[str, Sequence[Sequence[MeasuredStep]]]


def bench(
    config_file: ConfigFile,
    overrides: Overrides = None,
    out: Annotated[Path, typer.Option(help="Folder for bench.md, bench.csv, bench.json and bench.png.")] = Path(
        "bench"
    ),
    replay: Annotated[
        Path | None, typer.Option(metavar="RUN", help="Answers as long and as right as this run recorded them.")
    ] = None,
    answer_tokens: Annotated[
        int | None,
        typer.Option(help="Tokens of every answer where no run is replayed; half of the longest if not given."),
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Times that everything has its turn.")] = 3,
    steps: Annotated[int, typer.Option(min=1, help="Measured steps of a turn.")] = 4,
    warm_up: Annotated[int, typer.Option(min=1, help="Steps of a turn before those that are measured.")] = 1,
    unmixed: Annotated[
        float | None,
        typer.Option(
            metavar="SHARE", help="Compares the method with itself where nobody learns from this share of the prompts."
        ),
    ] = None,
    scaling: Annotated[
        bool, typer.Option("--scaling", help="Takes steps of 1, 2 and 3 agents, and of 1, 2 and 4 lanes, instead.")
    ] = False,
) -> None:
    """Time the same work under every schedule on this machine: its method, agents in turns, gspo_x2, gspo."""
    if inside_a_job():
        raise ValueError("bench starts its ranks itself, on this machine: call it outside torchrun and srun")
    with tempfile.TemporaryDirectory(prefix="hacpo_bench_") as folder:
        work, num_steps = Path(folder), warm_up + steps
        workload = _workload(config_file, overrides or (), replay, answer_tokens)
        blocks = _blocks(config_file, overrides or (), work, num_steps, workload, unmixed, scaling)
        require_folder(out)
        prepare_environment()
        from hacpo_lab.throughput.bench import Bench

        run = Bench(blocks, rounds, num_steps, warm_up, work)
        (_report_scaling if scaling else _report_schedules)(run, out, _facts(workload, rounds, steps, warm_up))


def _workload(file: Path, overrides: Sequence[str], replay: Path | None, answer_tokens: int | None) -> "Workload":
    from hacpo_lab.throughput.workload import fixed, replayed
    from hacpo_mega.config import load_config

    config = load_config(file, overrides)
    if replay is None:
        return fixed(config, answer_tokens)
    if answer_tokens is not None:
        raise ValueError("--replay has its own lengths: leave --answer-tokens out")
    return replayed(config, replay)


def _blocks(file: Path, overrides: Sequence[str], work: Path, num_steps: int, workload: "Workload",
            unmixed: float | None, scaling: bool) -> "list[Block]":  # fmt: skip
    from hacpo_lab.throughput.bench import Block
    from hacpo_lab.throughput.scaling import scaling_blocks
    from hacpo_lab.throughput.schedules import IN_TURNS, Schedule, load_schedule, schedules_of, with_and_without
    from hacpo_mega.config import load_config

    config = load_config(file, overrides)
    if unmixed is not None and scaling:
        raise ValueError("--scaling and --unmixed ask for different steps: give one of them")
    if workload.steps and (unmixed is not None or scaling):
        raise ValueError("--replay has the prompts and rewards of its run: leave it out with --scaling and --unmixed")
    if unmixed is None and not scaling:
        blocks = []
        for schedule in schedules_of(config):
            try:
                loaded = load_schedule(file, overrides, schedule, work / "run", num_steps)
            except ValueError as error:
                if schedule.name != IN_TURNS:  # all agents on the same devices may not fit into their memory
                    raise
                say(f"left out: {error}")
            else:
                blocks.append(Block(schedule.name, loaded, workload))
        return blocks
    alone = load_schedule(file, overrides, Schedule(config.algorithm.method), work / "run", num_steps)
    return scaling_blocks(alone, workload) if scaling else with_and_without(alone, workload, unmixed)


def require_folder(out: Path) -> None:
    """Makes the folder of the results, before minutes are spent on them. ValueError where it cannot be made."""
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"--out {out}: no folder can be made there ({error.strerror}); give another") from error


def run_blocks(run: "Bench") -> "StepsByBlock":
    """The measured steps of every block, by ranks that are forked from a server."""
    from hacpo_lab.experiments.campaign import PRELOAD
    from hacpo_lab.forked import JobServer

    return run.run(JobServer(PRELOAD), bench_rank)


def _report_schedules(run: "Bench", out: Path, facts: Mapping[str, str]) -> None:
    from hacpo_lab.throughput.figure import draw_throughput
    from hacpo_lab.throughput.summary import summarize
    from hacpo_lab.throughput.table import to_csv, to_json, to_markdown
    from hacpo_mega.models.families.architecture import Architecture

    agents = run.blocks[0].config.agents
    models = {agent.name: Architecture.from_folder(agent.model) for agent in agents}
    adapters = {agent.name: agent.adapters(models[agent.name]) for agent in agents}
    shared = {block.name for block in run.blocks if block.config.placement == "shared"}
    summaries = [
        summarize(name, rounds, models, adapters=adapters, takes_turns=name in shared)
        for name, rounds in run_blocks(run).items()
    ]
    markdown = to_markdown(facts, summaries)
    for name, text in (("md", markdown), ("csv", to_csv(summaries)), ("json", to_json(facts, summaries))):
        (out / f"bench.{name}").write_text(text, encoding="utf-8")
    draw_throughput(out / "bench.json")
    say(f"\n{markdown}\nwritten to {out}/bench.*")


def _report_scaling(run: "Bench", out: Path, facts: Mapping[str, str]) -> None:
    import json

    from hacpo_lab.throughput.scaling import scaling_rows
    from hacpo_lab.throughput.table import markdown, size_tables

    rows = scaling_rows(run.blocks, run_blocks(run))
    text = markdown(facts, size_tables(rows))
    (out / "scaling.md").write_text(text, encoding="utf-8")
    (out / "scaling.json").write_text(json.dumps({"facts": facts, "sizes": rows}, indent=1) + "\n", encoding="utf-8")
    say(f"\n{text}\nwritten to {out}/scaling.*")


def _facts(workload: "Workload", rounds: int, steps: int, warm_up: int) -> dict[str, str]:
    work = f"{len(workload.steps)} recorded steps" if workload.steps else f"answers of {workload.tokens} tokens"
    return facts_of(f"{work}; {rounds} rounds of {steps} steps after {warm_up} of warm-up")


def facts_of(work: str) -> dict[str, str]:
    """Facts of a measurement: machine, commit, versions, `work`."""
    from hacpo_lab.experiments.result import this_machine
    from hacpo_mega.logbook.run.provenance import installed_versions, source_commit

    machine = this_machine()
    return {
        "machine": f"{machine.cores} cores, {machine.cpu}",
        "commit": source_commit() or "unknown",
        "versions": ", ".join(f"{name} {version}" for name, version in installed_versions().items()),
        "work": work,
    }
