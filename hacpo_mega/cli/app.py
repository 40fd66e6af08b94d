"""The command line: `hacpo-mega config | check | init | train | experiment | bench | doctor | report | eval | ...`.

It parses first and imports heavy rooms last.

Exit codes: 0 done, 1 a finding (doctor above its tolerance), 2 the user's input is wrong (one line per problem), 5 a
node is bad (preflight).
The imports inside functions are on purpose: `--help` and `check` must answer without torch.
"""

import errno
import json
import os
import shlex
import sys
import traceback
from functools import partial
from importlib.metadata import entry_points
from pathlib import Path
from typing import Annotated, Any

import rich
import typer
from click import HelpFormatter

from hacpo_mega import __version__
from hacpo_mega.checkpoint.disk_space import require_room
from hacpo_mega.checkpoint.files import StartOptions, committed_steps
from hacpo_mega.cli.check import check
from hacpo_mega.cli.data import data_app, grade
from hacpo_mega.cli.evaluation import WithKeys, evaluate_model, serve
from hacpo_mega.cli.export import export
from hacpo_mega.cli.preflight import preflight
from hacpo_mega.cli.quickstart import quickstart
from hacpo_mega.cli.slurm import begin_attempt, slurm
from hacpo_mega.cli.start import (
    Accept,
    Branch,
    ConfigFile,
    Fresh,
    LastWhole,
    Overrides,
    load_checked,
    this_process_is_a_rank,
)
from hacpo_mega.cluster.launcher_env import FAILED, RESUMABLE, Unreachable
from hacpo_mega.cluster.machine.environment import (
    inside_a_job,
    is_first_of_its_node,
    is_first_of_the_job,
)
from hacpo_mega.cluster.machine.machine_limits import require_processes
from hacpo_mega.cluster.rank_map import RankMap
from hacpo_mega.config import Config
from hacpo_mega.config.describe import describe, in_a_run, keys_of, nearest_key
from hacpo_mega.jobs.attempts import record_termination
from hacpo_mega.logbook.run.provenance import finished_notice, installed_versions
from hacpo_mega.models.files.visible import say

# Options of other trainers for the configuration.
CONFIGURATION_OPTIONS = ("config", "config_file", "config_path", "config_name", "file")


class _Commands(typer.core.TyperGroup):
    """Lists the commands with their whole first lines, which click would cut, and explains a key given as an option."""

    def invoke(self, ctx: typer.Context) -> Any:
        given = [*ctx._protected_args, *ctx.args]
        try:
            return super().invoke(ctx)
        except Exception as error:
            # The error is known by its name, since later versions of typer bring their own copy of click.
            message = _key_suggestion(error, given) if type(error).__name__ == "NoSuchOption" else None
            if message is not None:
                raise ValueError(message) from error
            raise

    def format_commands(self, ctx: typer.Context, formatter: HelpFormatter) -> None:
        commands = ((name, self.get_command(ctx, name)) for name in self.list_commands(ctx))
        with formatter.section("Commands"):
            formatter.write_dl([(name, " ".join(command.help.split())) for name, command in commands])


def _key_suggestion(error: Any, given: list[str]) -> str | None:
    """The error text for an option such as --num_steps 5 that should be key=value; None if it is no key."""
    option, command = error.option_name, error.ctx.command
    if not any(parameter.name == "overrides" for parameter in command.params):
        return None
    index = next((n for n, word in enumerate(given) if word.partition("=")[0] == option), len(given))
    word, after, *_ = [*given[index : index + 2], "", ""]
    value = word.partition("=")[2] or ("" if after.startswith("-") else after)
    name = option.lstrip("-").replace("-", "_")
    if name in CONFIGURATION_OPTIONS:
        return f"{option}: there is no such option; write hacpo-mega {error.ctx.info_name} {value or 'CONFIG'}"
    keys = list(keys_of(Config))
    key = name if name in keys else nearest_key(name)
    if key is None or not option.startswith("--") or any(other.startswith(f"{key}.") for other in keys):
        return None
    word = shlex.quote(f"{in_a_run(key)}={value or 'VALUE'}")
    return f"{option}: there is no such option; behind the configuration write {word}"


app = typer.Typer(
    cls=_Commands,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # its panels crop the names of options at 80 columns
)

app.add_typer(data_app, name="data")


def _print_version(is_asked: bool) -> None:
    if is_asked:
        versions = (f"{name} {version}" for name, version in installed_versions().items())
        say(f"hacpo-mega {__version__} ({', '.join(versions)})")
        raise typer.Exit


@app.callback()
def every_command(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print versions and exit.")
    ] = False,
) -> None:
    """Train different language models together, each learning from the others."""


@app.command(name="config")
def describe_config(
    key: Annotated[
        str | None, typer.Argument(metavar="[KEY]", help="A table or a field: algorithm, agents.tp.")
    ] = None,
) -> None:
    """Print every key of a run's TOML file: its values, its default, what it is; for the algorithm, both presets."""
    rich.print(describe(key))


app.command()(check)


@app.command()
def init(config_file: ConfigFile, overrides: Overrides = None) -> None:
    """Create and warm-start the models of the agents.init tables; folders that exist are left alone."""
    config = load_checked(config_file, overrides)
    missing = [agent for agent in config.agents if agent.init and not (agent.model / "config.json").is_file()]
    if not inside_a_job() and not missing:
        say("every model folder exists: nothing to create")
        return
    if not this_process_is_a_rank(config, "hacpo_mega.commands.warm_start", heavy="hacpo_mega.megatron.actor"):
        return
    from hacpo_mega.commands.warm_start import initialize

    initialize(config)


@app.command()
def train(
    config_file: ConfigFile,
    overrides: Overrides = None,
    fresh: Fresh = False,
    accept: Accept = None,
    branch: Branch = None,
    last_whole: LastWhole = False,
) -> None:
    """Train all agents of a configuration together; a run that run_dir holds goes on from its last checkpoint."""
    options = StartOptions(fresh=fresh, accept=accept or [], branch=branch, last_whole=last_whole)
    require_inputs = partial(_require_inputs, options=options)
    config = load_checked(config_file, overrides, with_models=True, before_download=require_inputs)
    if not inside_a_job():  # the ranks of a job check this when they start, before they load a model
        if num_repeated := require_inputs(config):
            say(f"{num_repeated:,} rows of data.files left out whose prompt an earlier one has (data.repeated)")
        require_room(config, fresh=fresh)
    if not fresh and (message := finished_notice(config.run_dir, config.num_steps, committed_steps(config.run_dir))):
        if is_first_of_its_node():
            say(message)
        return
    if not this_process_is_a_rank(config, "hacpo_mega.trainer.trainer"):
        return
    begin_attempt(config.run_dir)
    is_first = is_first_of_the_job()  # asked here, since an engine changes the variables that say so
    from hacpo_mega.trainer.trainer import Trainer

    with Trainer(config, **options) as trainer:
        is_done = trainer.fit()
        if is_done and config.logging.report != "never":
            trainer.write_report()
    if not is_done:
        if is_first:
            record_termination(config.run_dir)
        raise typer.Exit(RESUMABLE)


def _require_inputs(config: Config, options: StartOptions) -> int:
    """Checks a run's inputs; returns the number of rows of data.files that are left out as repeated (data.repeated).

    ValueError for a run that cannot go on as asked, for rows that are no prompts, and for too few processes.
    """
    from hacpo_mega.data.prompt_files import require_good_files
    from hacpo_mega.logbook.files.metrics import require_readable_metrics
    from hacpo_mega.logbook.run.run_inputs import start_with_same_inputs

    start = start_with_same_inputs(config, **options)
    if start is not None and committed_steps(config.run_dir) and not options["fresh"]:
        require_readable_metrics(config.run_dir)
    num_repeated = require_good_files(config)
    require_processes(RankMap.of(config), config.reward.num_workers)
    return num_repeated


# Commands that other packages register, as hacpo_lab does in setup.py.
for _entry in entry_points(group="hacpo_mega.commands"):
    app.command(name=_entry.name)(_entry.load())
app.command()(preflight)
app.command()(quickstart)
app.command()(slurm)


@app.command()
def doctor(
    config_file: ConfigFile,
    overrides: Overrides = None,
    tolerance: Annotated[
        float | None,
        typer.Option(help="Log-prob difference (nats) that passes; 1e-4 in fp32, 0.5 for 99 % in bf16."),
    ] = None,
) -> None:
    """Compare log-probs of Megatron, Hugging Face and the live vLLM engine, for every agent on this layout."""
    config = load_checked(config_file, overrides, with_models=True).colocated
    if not this_process_is_a_rank(config, "hacpo_mega.commands.doctor"):
        return
    from hacpo_mega.commands.doctor import examine

    if not examine(config, tolerance):
        raise typer.Exit(1)


@app.command()
def report(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print the run in short for machines.")] = False,
) -> None:
    """Write report.html and its curves from a run folder."""
    from hacpo_mega.report import summary, write_report

    say(json.dumps(summary(run_dir), indent=2) if as_json else write_report(run_dir))


@app.command()
def watch(
    folders: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Folders of runs, experiment, bench, eval.")],
    port: Annotated[int, typer.Option(help="Port of the loopback interface; 0: a free one.")] = 0,
) -> None:
    """Show runs, as they go on or long ago, and results on a local page: curves, every answer, the job, comparison."""
    from hacpo_mega.watch import watch as follow

    os.nice(10)  # a run on the same cores goes first
    follow(folders, port, say)


app.command(name="eval", cls=WithKeys, context_settings={"ignore_unknown_options": True})(evaluate_model)
app.command()(export)
app.command()(grade)
app.command()(serve)


def main() -> None:
    """Entry point. Wrong input (2), and an unreachable rank 0 or a full disk (1), are reported without a traceback."""
    try:
        _require_current_folder()
        app()
    except ValueError as error:
        say(error, file=sys.stderr)
        sys.exit(2)
    except Unreachable as error:
        if str(error):  # else another rank prints the reason
            say(error, file=sys.stderr)
        sys.exit(FAILED)
    except Exception as error:  # `say` escapes control characters, which a traceback may quote from foreign texts
        say(_disk_full_message(error) or "".join(traceback.format_exception(error)).rstrip(), file=sys.stderr)
        sys.exit(1)


def _require_current_folder() -> None:
    """ValueError if the current folder has been removed: no relative path has a meaning then."""
    try:
        os.getcwd()
    except FileNotFoundError as error:
        raise ValueError("the current folder does not exist any more: change to one that does") from error


def _disk_full_message(error: Exception) -> str | None:
    """The message if the disk was full for a file or the command's output; None for any other error."""
    if not isinstance(error, OSError) or error.errno not in (errno.ENOSPC, errno.EDQUOT):
        return None
    return f"{error.filename or 'what this command prints'} cannot be written: {error.strerror}"


if __name__ == "__main__":
    main()
