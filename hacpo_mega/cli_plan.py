"""The command `hacpo-mega plan`: what a configuration takes on machines that are not here.

Imports are inside the function, as in cli.py; torch is loaded for --trace alone.
"""

from pathlib import Path
from typing import Annotated

import typer

from hacpo_mega.cluster.environment import prepare_environment


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
) -> None:
    """Plan memory, messages, seconds and waiting on a cluster, and the layout in which all agents finish together."""
    from hacpo_mega.planning.cluster_file import load_cluster
    from hacpo_mega.planning.comparison import compare, comparison_table, factors_of, read_run, work_of_run
    from hacpo_mega.planning.configuration import load_planned
    from hacpo_mega.planning.plan import make_plan
    from hacpo_mega.planning.refusals import refusals
    from hacpo_mega.planning.search import find_ways
    from hacpo_mega.planning.table import as_json, shown
    from hacpo_mega.planning.work import Lengths, work_of

    cluster = load_cluster(cluster_file)
    planned = load_planned(config_file, overrides or (), cluster)
    lengths = Lengths(prompt_tokens, answer_tokens)
    work = {agent.name: work_of(planned.config, lengths) for agent in planned.config.agents}
    steps = [] if run is None else read_run(run, planned.config)
    if steps:
        work = work_of_run(planned.config, lengths, steps)
    found = make_plan(planned, work, cluster)
    compared = compare(found, steps) if steps else []
    ways = find_ways(planned, work, cluster, factors_of(compared))
    if problems := refusals(planned, found, work, ways):
        raise ValueError("\n".join(f"{config_file}: {problem}" for problem in problems))
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
        from hacpo_mega.planning.traced import trace_table

        print(f"\n{trace_table(found)}")
