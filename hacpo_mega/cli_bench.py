"""The command `hacpo-mega bench`: what a step of the configuration's method costs beside its agents alone.

Imports are inside functions, as in cli.py: `--help` must answer without torch, and the ranks load the trainer.
"""

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hacpo_mega.cluster.environment import inside_a_job, prepare_environment

if TYPE_CHECKING:
    from hacpo_mega.config import Config
    from hacpo_mega.throughput.workload import Workload


def bench(
    config_file: Annotated[Path, typer.Argument(metavar="CONFIG", help="The run's TOML file.")],
    overrides: Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]...")] = None,
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
    rounds: Annotated[int, typer.Option(min=1, help="Times that every schedule has its turn.")] = 3,
    steps: Annotated[int, typer.Option(min=1, help="Measured steps of a turn.")] = 4,
    warm_up: Annotated[int, typer.Option(min=1, help="Steps of a turn before those that are measured.")] = 1,
) -> None:
    """Time the same work under every schedule, in turns on this machine: its method, gspo_x2, gspo."""
    from hacpo_mega.config import load_config
    from hacpo_mega.throughput.schedules import load_schedule, schedules_of
    from hacpo_mega.throughput.workload import fixed, replayed

    if inside_a_job():
        raise ValueError("bench starts its ranks itself, on this machine: call it outside torchrun and srun")
    config = load_config(config_file, overrides or ())
    if replay is not None and answer_tokens is not None:
        raise ValueError("--replay has its own lengths: leave --answer-tokens out")
    workload = fixed(config, answer_tokens) if replay is None else replayed(config, replay)
    num_steps = warm_up + steps
    with tempfile.TemporaryDirectory(prefix="hacpo_bench_") as work:
        configs = {
            schedule: load_schedule(config_file, overrides or (), schedule, Path(work) / "run", num_steps)
            for schedule in schedules_of(config)
        }
        _measure(config, configs, Path(work), out, rounds, num_steps, warm_up, workload)


def _measure(config: "Config", configs: dict, work: Path, out: Path, rounds: int, num_steps: int, warm_up: int,
             workload: "Workload") -> None:  # fmt: skip
    prepare_environment()
    from hacpo_mega.cluster.forked_job import JobServer
    from hacpo_mega.experiments.campaign import PRELOAD
    from hacpo_mega.models.architecture import Architecture
    from hacpo_mega.report.throughput import draw_throughput
    from hacpo_mega.throughput.bench import Bench
    from hacpo_mega.throughput.summary import summarize
    from hacpo_mega.throughput.table import to_csv, to_json, to_markdown

    found = Bench(configs, rounds, num_steps, warm_up, work).run(JobServer(PRELOAD), bench_rank, workload)
    models = {agent.name: Architecture.from_folder(agent.model) for agent in config.agents}
    summaries = [summarize(schedule.name, blocks, models) for schedule, blocks in found.items()]
    facts = _facts(workload, rounds, num_steps - warm_up, warm_up)
    out.mkdir(parents=True, exist_ok=True)
    markdown = to_markdown(facts, summaries)
    for name, text in (("md", markdown), ("csv", to_csv(summaries)), ("json", to_json(facts, summaries))):
        (out / f"bench.{name}").write_text(text, encoding="utf-8")
    draw_throughput(out / "bench.json")
    print(f"\n{markdown}\nwritten to {out}/bench.*")


def _facts(workload: "Workload", rounds: int, steps: int, warm_up: int) -> dict[str, str]:
    from hacpo_mega.experiments.result import this_machine
    from hacpo_mega.logbook.provenance import installed_versions, source_commit

    machine = this_machine()
    work = f"{len(workload.steps)} recorded steps" if workload.steps else f"answers of {workload.tokens} tokens"
    return {
        "machine": f"{machine.cores} cores, {machine.cpu}",
        "commit": source_commit() or "unknown",
        "versions": ", ".join(f"{name} {version}" for name, version in installed_versions().items()),
        "work": f"{work}; {rounds} rounds of {steps} steps after {warm_up} of warm-up",
    }


def bench_rank(config_file: str, num_steps: int, workload: "Workload") -> None:
    """What one rank of a block does, in a process forked from the server."""
    from hacpo_mega.config import load_config
    from hacpo_mega.throughput.measured_trainer import take_steps

    take_steps(load_config(config_file), workload, num_steps)
