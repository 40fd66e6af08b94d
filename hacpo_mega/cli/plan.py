"""The command `hacpo-mega plan`: what a configuration takes on machines that are not here.

Imports are inside functions, as in cli/app.py; torch is loaded for --trace and --measure alone.
"""

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hacpo_mega.cli.bench import facts_of, require_folder, run_blocks
from hacpo_mega.cluster.environment import inside_a_job, prepare_environment

if TYPE_CHECKING:
    from hacpo_mega.lab.planning.cluster_file import Cluster

# Of --measure, for every layout.
MEASURED_ROUNDS, MEASURED_STEPS = 2, 3


def plan(
    config_file: Annotated[Path, typer.Argument(metavar="CONFIG", help="The run's TOML file.")],
    overrides: Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]...")] = None,
    cluster_file: Annotated[Path, typer.Option("--cluster", help="The machines' TOML file (docs/planning.md).")] = ...,
    prompt_tokens: Annotated[
        int | None, typer.Option(help="Of a prompt, on average; half of the longest if not given.")
    ] = None,
    answer_tokens: Annotated[
        int | None, typer.Option(help="Of an answer, on average; half of the longest if not given.")
    ] = None,
    run: Annotated[
        Path | None, typer.Option("--from", metavar="RUN", help="A run's measured seconds beside the plan's.")
    ] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Writes the plan there, too.")
    ] = None,
    trace: Annotated[
        bool, typer.Option("--trace", help="Hold the memory against the real model on tensors without numbers.")
    ] = False,
    measure: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Take steps on this machine instead and hold their plan against them."),
    ] = None,
    layouts: Annotated[
        list[str] | None,
        typer.Option("--layout", metavar="'KEY=VALUE ...'", help="A layout to measure; none: CONFIG's. Repeatable."),
    ] = None,
) -> None:
    """Plan memory, messages, seconds and waiting on a cluster, and the layout in which all agents finish together."""
    from hacpo_mega.lab.planning.cluster_file import load_cluster

    cluster = load_cluster(cluster_file)
    if measure is None:
        if layouts:
            raise ValueError("--layout is for what is measured: give it with --measure, or its keys after CONFIG")
        return _plan(config_file, overrides or (), cluster, prompt_tokens, answer_tokens, run, json_file, trace)
    if prompt_tokens is not None or run is not None or json_file is not None or trace:
        raise ValueError("--measure takes steps of its own: leave --prompt-tokens, --from, --json and --trace out")
    _measure(config_file, overrides or (), layouts or [""], cluster, answer_tokens, measure)


def _plan(file: Path, overrides: Sequence[str], cluster: "Cluster", prompt_tokens: int | None,
          answer_tokens: int | None, run: Path | None, json_file: Path | None, trace: bool) -> None:  # fmt: skip
    from hacpo_mega.lab.planning.comparison import compare, comparison_table, factors_of, read_run, work_of_run
    from hacpo_mega.lab.planning.configuration import load_planned
    from hacpo_mega.lab.planning.plan import make_plan
    from hacpo_mega.lab.planning.refusals import refusals
    from hacpo_mega.lab.planning.search import find_ways
    from hacpo_mega.lab.planning.table import as_json, shown
    from hacpo_mega.lab.planning.work import Lengths, work_of

    planned = load_planned(file, overrides, cluster)
    lengths = Lengths(prompt_tokens, answer_tokens)
    work = {agent.name: work_of(planned.config, lengths) for agent in planned.config.agents}
    steps = [] if run is None else read_run(run, planned.config)
    if steps:
        work = work_of_run(planned.config, lengths, steps)
    found = make_plan(planned, work, cluster)
    compared = compare(found, steps) if steps else []
    ways = find_ways(planned, work, cluster, factors_of(compared))
    if problems := refusals(planned, found, work, ways):
        raise ValueError("\n".join(f"{file}: {problem}" for problem in problems))
    print(shown(found, ways))
    if compared:
        print(f"\n{comparison_table(compared)}\nthe layouts above are those that the measured seconds speak for")
    if json_file is not None:
        try:
            json_file.write_text(as_json(found, ways), encoding="utf-8")
        except OSError as error:
            raise ValueError(f"--json {json_file}: cannot be written ({error.strerror}); give a file") from error
    if trace:
        prepare_environment()
        from hacpo_mega.lab.planning.traced import trace_table

        print(f"\n{trace_table(found)}")


def _measure(file: Path, overrides: Sequence[str], layouts: Sequence[str], cluster: "Cluster",
             answer_tokens: int | None, out: Path) -> None:  # fmt: skip
    """Holds the plan of every layout against steps that this machine takes with it, in turns."""
    if inside_a_job():
        raise ValueError("plan --measure starts its ranks itself, on this machine: call it outside torchrun and srun")
    if not cluster.on_cpu:
        raise ValueError("--measure compares processor seconds: give a cluster with processor = 'cpu'")
    require_folder(out)
    prepare_environment()
    from hacpo_mega.lab.planning.calibration import calibrate, calibration_table
    from hacpo_mega.lab.planning.configuration import load_planned
    from hacpo_mega.lab.throughput.bench import Bench, Block
    from hacpo_mega.lab.throughput.schedules import Schedule, load_schedule
    from hacpo_mega.lab.throughput.table import fact_lines
    from hacpo_mega.lab.throughput.workload import fixed

    with tempfile.TemporaryDirectory(prefix="hacpo_plan_") as folder:
        blocks, planned = [], []
        for layout in dict.fromkeys(layouts):
            schedule = Schedule(layout or "as it is", tuple(layout.split()))
            config = load_schedule(file, overrides, schedule, Path(folder) / "run", MEASURED_STEPS + 1)
            blocks.append(Block(schedule.name, config, fixed(config, answer_tokens)))
            planned.append(load_planned(file, (*overrides, *schedule.overrides), cluster))
        found = run_blocks(Bench(blocks, MEASURED_ROUNDS, MEASURED_STEPS + 1, 1, Path(folder)))
    rows = [
        row for block, each in zip(blocks, planned) for row in calibrate(block.name, each, found[block.name], cluster)
    ]
    facts = facts_of(f"{MEASURED_ROUNDS} rounds of {MEASURED_STEPS} steps after 1 of warm-up")
    text = "\n".join([*fact_lines(facts), "", *calibration_table(rows)]) + "\n"
    (out / "calibration.md").write_text(text, encoding="utf-8")
    print(f"\n{text}\nwritten to {out}/calibration.md")
