"""The command `hacpo-mega check`: whether a configuration can run, on one screen of 80 columns.

Imports of what is heavy are inside functions, as in app.py.
"""

import json
import shlex
import shutil
import sys
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated

import typer

from hacpo_mega.cli.start import ConfigFile, Overrides, load_checked
from hacpo_mega.cluster.machine.environment import has_tracker_login, prepare_environment, reads_first
from hacpo_mega.cluster.rank_map import RankMap
from hacpo_mega.config import Config
from hacpo_mega.config.checks.checks import architecture_of
from hacpo_mega.config.checks.device_memory import agent_budgets, memory_summary, memory_table, model_size
from hacpo_mega.config.checks.input_checks import missing_models
from hacpo_mega.config.checks.notes import (
    default_success_note,
    missing_kernels,
    narrow_clip_note,
    suggestions,
    unread_settings,
    unused_fields,
    weak_settings,
)
from hacpo_mega.config.checks.tokenizer_checks import template_notes
from hacpo_mega.config.describe import batch_arithmetic, differing
from hacpo_mega.config.tables.slurm import SlurmConfig, time_note
from hacpo_mega.config.user_code import shown_grader
from hacpo_mega.memory.budget import Budget
from hacpo_mega.models.files.visible import say

WIDTH = 80
MOST_OF_A_VALUE = 50  # characters; --resolved has all of them


def check(
    config_file: ConfigFile,
    overrides: Overrides = None,
    data: Annotated[
        bool, typer.Option("--data", help="Read every data file, list all bad rows, count prompts.")
    ] = False,
    resolved: Annotated[
        bool, typer.Option("--resolved", help="Print every key with its value, and the memory of every phase.")
    ] = False,
    world_size: Annotated[bool, typer.Option("--world-size", help="Print only the number of ranks.")] = False,
    run_dir: Annotated[bool, typer.Option("--run-dir", help="Print only the run folder.")] = False,
) -> None:
    """Check a configuration; print non-default keys, placement of ranks, batch and memory; load no model."""
    config = load_checked(config_file, overrides)
    ranks = RankMap.of(config)
    if world_size or run_dir:
        say(ranks.world_size if world_size else config.run_dir)
        return
    budgets: dict[str, Budget] = {}
    for agent in config.agents:
        budgets |= agent_budgets(config, agent, architecture_of(agent))
    if resolved:
        whole = config.model_dump(mode="json", exclude_none=True)
        parts = [json.dumps(whole, indent=2), ranks.table(), batch_arithmetic(config), memory_table(budgets)]
    else:
        models = "\n".join(_agents(config, budgets))
        parts = [_settings(config_file, config), models, ranks.table(), batch_arithmetic(config)]
        parts.append(memory_summary(budgets))
    say("\n\n".join(parts))
    say("\n" + "\n".join(_wrapped(note) for note in notes(config)))
    if data:
        prepare_environment()
        from hacpo_mega.commands.check_prompts import check_prompts

        say(f"\n{check_prompts(config)}")
    say(f"\n{_what_next(config_file, overrides or [], config, ranks)}")


def notes(config: Config) -> Iterator[str]:
    """Notes on a valid configuration, a line each: every judge, suggestions, warnings."""
    for key, grader in config.reward.graders.items():
        yield f"{key}: {shown_grader(grader.kind, grader.options)}"
    yield from default_success_note(config)
    yield from suggestions(config)
    yield from weak_settings(config)
    yield from unread_settings(config)
    yield from missing_kernels(config)
    yield from narrow_clip_note(config)
    if reads_first():  # a template is a program, run once on a node
        yield from template_notes(config.agents)
    yield from unused_fields(config)
    if "wandb" in config.logging.trackers and not has_tracker_login():
        yield "logging.trackers: wandb has no login and would ask for one: `wandb login`, or WANDB_MODE=offline"
    if note := time_note(config.slurm.time):
        yield note


def _settings(config_file: Path, config: Config) -> str:
    """Values that differ from the default, a paragraph for every table."""
    lines = [f"{_cut(str(config_file), WIDTH - 49)}: what is not the default (--resolved: every key)"]
    for name, table in differing(config).items():
        keys = [f"{key} = {_cut(value)}" for key, value in table.items() if not _is_left_out(name, key)]
        if num_init := sum(key.startswith("init.") for key in table):
            keys.append(f"init = {{ {num_init} keys }}")
        if keys:
            lines += _filled(f"{name}: " if name else "", keys)
    return "\n".join(lines)


def _is_left_out(table: str, key: str) -> bool:
    """True if the key is shown elsewhere on the screen, or is one of the many of agents.init, which are counted."""
    return table.startswith("agents.") and (key == "model" or key.startswith("init."))


def _filled(head: str, items: Sequence[str]) -> Iterator[str]:
    """Items with commas between them, in lines of at most WIDTH characters; no line ends inside an item."""
    line = f"  {head}{items[0]}"
    for item in items[1:]:
        if len(line) + len(item) + 3 > WIDTH:
            yield f"{line},"
            line = f"    {item}"
        else:
            line += f", {item}"
    yield line


def _agents(config: Config, budgets: dict[str, Budget]) -> Iterator[str]:
    """A line for the model of every agent."""
    width = min(20, max(len(agent.name) for agent in config.agents))
    for agent in config.agents:
        architecture = architecture_of(agent)
        text = f"{agent.name:{width}}  {architecture.family}, {model_size(budgets[agent.name])}  "
        yield f"{text}{_cut(str(agent.model), max(20, WIDTH - len(text)))}"


def _cut(text: str, most: int = MOST_OF_A_VALUE) -> str:
    """A text of at most `most` characters: a longer one keeps its beginning and its end."""
    if len(text) <= most:
        return text
    head = (most - 3) // 3
    return f"{text[:head]}...{text[head + 3 - most :]}"


def _wrapped(line: str) -> str:
    """A line broken at spaces to the width of the terminal; unbroken in a file or a pipe."""
    if not sys.stdout.isatty():
        return line
    width = max(40, shutil.get_terminal_size().columns)
    return textwrap.fill(line, width, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)


def _what_next(config_file: Path, overrides: Sequence[str], config: Config, ranks: RankMap) -> str:
    """The last line: the command that trains by this configuration."""
    arguments = shlex.join([str(config_file), *overrides])
    on_cluster = config.slurm != SlurmConfig() or ranks.num_devices > max(1, config.slurm.gpus_per_node)
    command = f"hacpo-mega {'slurm' if on_cluster else 'train'} {arguments}"
    first = f"first make the models: hacpo-mega init {arguments}\n" if missing_models(config) else ""
    return f"{first}ok: train with {command}"
