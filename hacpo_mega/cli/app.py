"""The command line: `hacpo-mega config | check | init | train | experiment | bench | doctor | report | eval | ...`.

It parses first and imports heavy rooms last.

Exit codes: 0 done, 1 a finding (doctor above its tolerance), 2 the user's input is wrong (one line per problem), 5 a
node is bad (preflight).
The imports inside functions are on purpose: `--help` and `check` must answer without torch.
"""

import json
import sys
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import rich
import typer

from hacpo_mega.checkpoint.disk_space import require_room
from hacpo_mega.checkpoint.files import StartOptions, committed_steps, find_start
from hacpo_mega.cli.bench import bench
from hacpo_mega.cli.chaos import chaos
from hacpo_mega.cli.data import data_app, grade
from hacpo_mega.cli.experiment import experiment
from hacpo_mega.cli.export import Trust, export
from hacpo_mega.cli.plan import plan
from hacpo_mega.cli.preflight import preflight
from hacpo_mega.cli.quickstart import quickstart
from hacpo_mega.cli.slurm import begin_attempt, slurm
from hacpo_mega.cluster.environment import (
    end_with_launcher,
    has_tracker_login,
    inside_a_job,
    is_first_of_its_node,
    job_size,
    prepare_environment,
    reads_first,
)
from hacpo_mega.cluster.machine_limits import require_processes
from hacpo_mega.cluster.rank_map import RankMap
from hacpo_mega.cluster.seat import Unreachable, num_local
from hacpo_mega.config import Config, load_config
from hacpo_mega.config.checks import architecture_of
from hacpo_mega.config.describe import batch_arithmetic, describe
from hacpo_mega.config.device_memory import agent_budget, memory_table
from hacpo_mega.config.grader_checks import shown_grader
from hacpo_mega.config.input_checks import missing_models
from hacpo_mega.config.load import load_unchecked
from hacpo_mega.logbook.provenance import what_is_finished
from hacpo_mega.models.hub import model_folder, not_cached
from hacpo_mega.models.visible import say

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Train different language models together, each learning from the others.",
)

app.add_typer(data_app, name="data")

ConfigFile = Annotated[Path, typer.Argument(metavar="CONFIG", help="The run's TOML file.")]
Overrides = Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="agents.NAME.key=value, ...")]


@app.command(name="config")
def describe_config(
    key: Annotated[
        str | None, typer.Argument(metavar="[KEY]", help="A table or a field: algorithm, agents.tp.")
    ] = None,
) -> None:
    """Print every key of a run's TOML file: its values, its default, what it is; for the algorithm, both presets."""
    rich.print(describe(key))


@app.command()
def check(
    config_file: ConfigFile,
    overrides: Overrides = None,
    data: Annotated[
        bool, typer.Option("--data", help="Read every data file, list all bad rows, count prompts.")
    ] = False,
    world_size: Annotated[bool, typer.Option("--world-size", help="Print only the number of ranks.")] = False,
    run_dir: Annotated[bool, typer.Option("--run-dir", help="Print only the run folder.")] = False,
) -> None:
    """Print the resolved configuration, who runs where, the batch arithmetic, the memory; load nothing heavy."""
    config = _load(config_file, overrides)
    ranks = RankMap.of(config)
    if world_size or run_dir:
        say(ranks.world_size if world_size else config.run_dir)
        return
    say(json.dumps(config.model_dump(mode="json", exclude_none=True), indent=2))
    budgets = {agent.name: agent_budget(config, agent, architecture_of(agent)) for agent in config.agents}
    say(f"\n{ranks.table()}\n\n{batch_arithmetic(config)}\n\n{memory_table(budgets)}")
    say(f"\n{shown_grader(config.reward.kind, config.reward.options)}")
    if "wandb" in config.logging.trackers and not has_tracker_login():
        say("logging.trackers: wandb has no login: it would ask for one at the start. `wandb login`, or WANDB_MODE=offline")
    if data:
        prepare_environment()
        from hacpo_mega.commands.check_prompts import check_prompts

        say(f"\n{check_prompts(config)}")


@app.command()
def init(config_file: ConfigFile, overrides: Overrides = None) -> None:
    """Create and warm-start the models of the agents.init tables; folders that exist are left alone."""
    config = _load(config_file, overrides)
    missing = [agent for agent in config.agents if agent.init and not (agent.model / "config.json").is_file()]
    if not inside_a_job() and not missing:
        say("every model folder exists: nothing to create")
        return
    if not _this_process_is_a_rank(config):
        return
    from hacpo_mega.commands.warm_start import initialize

    initialize(config)


@app.command()
def train(
    config_file: ConfigFile,
    overrides: Overrides = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Start anew; what lies in run_dir moves aside.")] = False,
    accept: Annotated[
        list[str] | None, typer.Option(metavar="KEY", help="A key that may differ from the run's that goes on.")
    ] = None,
    branch: Annotated[
        Path | None, typer.Option("--from", metavar="STEP", help="RUN/checkpoints/step_N: a new run begins there.")
    ] = None,
    last_whole: Annotated[bool, typer.Option("--last-whole", help="Move damaged checkpoints aside.")] = False,
) -> None:
    """Train all agents of a configuration together; a run that run_dir holds goes on from its last checkpoint."""
    config = _load(config_file, overrides, with_models=True)
    how = StartOptions(fresh=fresh, accept=accept or [], branch=branch, last_whole=last_whole)
    if not inside_a_job():  # a job's ranks look and read when they start, before they load a model
        from hacpo_mega.data.prompt_files import require_good_files
        from hacpo_mega.logbook.metrics import require_readable_metrics

        if find_start(config, **how) is not None and committed_steps(config.run_dir) and not fresh:
            require_readable_metrics(config.run_dir)
        require_room(config, fresh=fresh)
        require_good_files(config)
        require_processes(RankMap.of(config), config.reward.num_workers)
    if not fresh and (said := what_is_finished(config.run_dir, config.num_steps, committed_steps(config.run_dir))):
        if is_first_of_its_node():
            say(said)
        return
    if not _this_process_is_a_rank(config):
        return
    begin_attempt(config.run_dir)
    from hacpo_mega.cluster.exit_status import RESUMABLE
    from hacpo_mega.trainer.trainer import Trainer

    with Trainer(config, **how) as trainer:
        is_done = trainer.fit()
    if not is_done:
        raise typer.Exit(RESUMABLE)


app.command()(experiment)
app.command()(bench)
app.command()(chaos)
app.command()(plan)
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
    config = _load(config_file, overrides, with_models=True)
    if not _this_process_is_a_rank(config):
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


@app.command(name="eval")
def evaluate_model(
    model: Annotated[Path, typer.Argument(metavar="MODEL", help="A folder, ORG/NAME, RUN/checkpoints/step_N/NAME.")],
    files: Annotated[list[Path] | None, typer.Argument(metavar="[FILE]...", help="Benchmarks of any layout.")] = None,
    out: Annotated[Path, typer.Option(help="Folder of answers and evaluation.json; an old one is continued.")] = ...,
    suite: Annotated[str | None, typer.Option(help="'paper': its seven benchmarks, found in --data.")] = None,
    data: Annotated[Path | None, typer.Option(help="Folder with a suite's files.")] = None,
    samples: Annotated[int, typer.Option("--samples", "-k", min=1, help="Answers per problem.")] = 1,
    temperature: Annotated[float | None, typer.Option(help="0 is greedy; 0 for one answer, else 1.")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Only the first problems of each benchmark.")] = None,
    max_tokens: Annotated[int | None, typer.Option(min=1, help="Of an answer.")] = None,
    max_prompt_tokens: Annotated[int | None, typer.Option(min=1, help="Longer prompts are dropped, counted.")] = None,
    chat_template: Annotated[bool | None, typer.Option("--chat-template/--no-chat-template")] = None,
    template_arg: Annotated[list[str] | None, typer.Option(help="KEY=VALUE, such as enable_thinking=false.")] = None,
    system_prompt: Annotated[str | None, typer.Option(help="The system message of the chat template.")] = None,
    prompt_template: Annotated[str | None, typer.Option(help="Text with {prompt}, or @FILE that holds it.")] = None,
    stop_text: Annotated[str | None, typer.Option(help="Judge an answer only up to this text.")] = None,
    reward: Annotated[str | None, typer.Option(help="math, math_any, arithmetic, exact, or module:function.")] = None,
    option: Annotated[list[str] | None, typer.Option(help="KEY=VALUE of the judge, such as rel_tol=0.01.")] = None,
    prompt_field: Annotated[str | None, typer.Option(help="Field of a row with the prompt, in every FILE.")] = None,
    gold_field: Annotated[str | None, typer.Option(help="Field of a row with the gold answer.")] = None,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    trust: Trust = False,
    tp: Annotated[int, typer.Option(min=1, help="Processes of one engine.")] = 1,
    engines: Annotated[int, typer.Option(min=1, help="Engines that share the problems.")] = 1,
    judges: Annotated[int, typer.Option(min=1, help="Grading processes of each engine.")] = 1,
) -> None:
    """Score a model on benchmarks: avg@k, best@k, pass@k, maj@k with intervals. Every answer is kept; resumable."""
    from hacpo_mega.evaluation.settings import ask, benchmarks_of, require_judge

    if not inside_a_job():
        _fetch([model])
    folder, fields = model_folder(model), {"prompt_field": prompt_field, "gold_field": gold_field}
    settings = ask(
        folder,
        benchmarks_of(files or [], suite, data, samples, temperature, limit, model=folder, **fields),
        is_suite=suite is not None,
        chat_template=chat_template,
        template_args=template_arg or [],
        system_prompt=system_prompt,
        prompt_template=prompt_template,
        stop_text=stop_text,
        reward=reward,
        max_prompt_tokens=max_prompt_tokens,
        max_answer_tokens=max_tokens,
        seed=seed,
        options=option or [],
        trust=trust,
    )
    if not inside_a_job():
        require_judge(settings)
    if not _is_one_of(tp * engines):
        return
    from hacpo_mega.evaluation.evaluate import evaluate
    from hacpo_mega.evaluation.table import print_table

    if evaluation := evaluate(settings, out, tp, engines, judges):
        print_table(evaluation)


app.command()(export)
app.command()(grade)


@app.command()
def theory(out: Annotated[Path, typer.Option()] = Path("runs/theory"), seed: int = 0) -> None:
    """Check the paper's theorems by simulation with the functions that train: tables, theory.json, theory.png."""
    prepare_environment()
    from hacpo_mega.lab.theory.theory import check_theory
    from hacpo_mega.report.theory import draw_theory

    result = check_theory(out, seed)
    say(f"{result}\n{draw_theory(result)}")


def _load(config_file: Path, overrides: list[str] | None, *, with_models: bool = False) -> Config:
    """The checked configuration; `with_models` also asks for the model folders that `init` would make."""
    with _one_voice_per_node():
        if with_models and not inside_a_job():
            _fetch(agent.model for agent in load_unchecked(config_file, overrides or []).agents if agent.init is None)
        config = load_config(config_file, overrides or [], try_templates=reads_first())
        if with_models and (missing := missing_models(config)):
            raise ValueError("\n".join(f"{config_file}: {problem}" for problem in missing))
    return config


def _fetch(models: Iterable[Path]) -> None:
    """Downloads the models of the Hub that are not in the cache; the library is loaded only where there is one."""
    if any(map(not_cached, models := list(models))):
        from hacpo_mega.commands.fetch_models import fetch_models

        fetch_models(models)


@contextmanager
def _one_voice_per_node() -> Iterator[None]:
    """Every process of a job finds the same problems here; the first of each node says them, the others end quietly."""
    try:
        yield
    except ValueError:
        if is_first_of_its_node():
            raise
        raise typer.Exit(2) from None


def _this_process_is_a_rank(config: Config) -> bool:
    """True inside a job. Outside, runs the whole job on this machine, and exits with its code if that is not 0."""
    ranks = RankMap.of(config)
    if inside_a_job():
        with _one_voice_per_node():
            ranks.require_world_size(job_size())
            ranks.require_one_node(num_local(job_size()))
    return _is_one_of(ranks.world_size)


def _is_one_of(world_size: int) -> bool:
    prepare_environment()
    if inside_a_job():
        end_with_launcher()
        from hacpo_mega.cluster.device import require_fitting_environment

        with _one_voice_per_node():
            require_fitting_environment()
        return True
    from hacpo_mega.jobs.local import run_on_this_machine

    code = run_on_this_machine(sys.argv[1:], world_size)
    if code:
        raise typer.Exit(code)
    return False


def main() -> None:
    """Entry point. What the user can mend is shown without a traceback: his input (2), a store out of reach (1)."""
    try:
        app()
    except (ValueError, Unreachable) as error:
        say(error, file=sys.stderr)
        sys.exit(2 if isinstance(error, ValueError) else 1)
    except Exception as error:  # a fault of ours may quote foreign text, which a terminal would obey
        say("".join(traceback.format_exception(error)).rstrip(), file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
