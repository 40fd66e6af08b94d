"""The command `hacpo-mega plan`: what a configuration takes on a cluster, without its machines.

Imports are inside functions, as in cli/app.py.
"""

from pathlib import Path
from typing import Annotated

import typer

from hacpo_mega.cli.start import ConfigFile, Overrides
from hacpo_mega.models.files.visible import say


def plan(
    config_file: ConfigFile,
    overrides: Overrides = None,
    cluster_file: Annotated[
        Path, typer.Option("--cluster", help="The machines' TOML file, docs/guide/planning.md.")
    ] = ...,
    prompt_tokens: Annotated[
        int | None, typer.Option(help="Of a prompt, on average; half of the longest if not given.")
    ] = None,
    answer_tokens: Annotated[
        int | None, typer.Option(help="Of an answer, on average; half of the longest if not given.")
    ] = None,
    turns: Annotated[float | None, typer.Option(help="Own turns of a conversation, on average.")] = None,
    others_tokens: Annotated[
        float | None, typer.Option(help="That others say between two own turns, on average.")
    ] = None,
    environment_s: Annotated[float, typer.Option(help="Seconds between two own turns, on average.")] = 0.0,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Writes the plan there, too.")
    ] = None,
) -> None:
    """Plan memory, messages, seconds and waiting on a cluster, and the layout in which all agents finish together."""
    from hacpo_lab.planning.cluster_file import load_cluster
    from hacpo_lab.planning.configuration import Lengths, load_planned, work_of
    from hacpo_lab.planning.plan import make_plan
    from hacpo_lab.planning.refusals import refusals, runnable
    from hacpo_lab.planning.search import find_layouts
    from hacpo_lab.planning.table import as_json, as_text
    from hacpo_mega.data.reading.files import refuse_overwriting, replacing

    if json_file is not None:
        refuse_overwriting(json_file, [config_file, cluster_file])
    cluster = load_cluster(cluster_file)
    planned = load_planned(config_file, overrides or (), cluster)
    lengths = Lengths(prompt_tokens, answer_tokens, turns, others_tokens, environment_s)
    work = {agent.name: work_of(planned.config, lengths) for agent in planned.config.agents}
    as_configured = make_plan(planned, work, cluster)
    layouts = runnable(planned, work, cluster, find_layouts(planned, work, cluster))
    if problems := refusals(planned, as_configured, work, layouts):
        raise ValueError("\n".join(f"{config_file}: {problem}" for problem in problems))
    say(as_text(as_configured, layouts))
    if json_file is not None:
        try:
            with replacing(json_file) as file:
                file.write(as_json(as_configured, layouts))
        except OSError as error:
            raise ValueError(f"--json {json_file}: cannot be written ({error.strerror}); give a file") from error
