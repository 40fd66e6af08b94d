"""Checks of files that a configuration names: run folder, prompts, grader, tokenizers. They are looked at, not loaded.

Every check is a `stat`, a small file, or the first bytes of a large one, so that `hacpo-mega check` answers at once.
Elsewhere: checks of all rows of a data file (data/prompt_sets.py) and of a model folder's layout.
"""

import codecs
import importlib.util
import os
import shlex
from collections.abc import Iterator
from pathlib import Path

from hacpo_mega.config.checks.run_dirs import run_dir_problems
from hacpo_mega.config.tables.agents import AgentConfig
from hacpo_mega.config.tables.schema import Config
from hacpo_mega.config.user_code import (
    environment_problem,
    function_problem,
    grader_problem,
    option_problem,
    own_code_problem,
    tracker_problem,
)
from hacpo_mega.models.files.documents import one_line, parse_json
from hacpo_mega.models.files.folder import tokenizer_problem

FIRST_BYTES = 1 << 20
PARQUET_MAGIC = b"PAR1"
SAVED_STATE = "state.json"
# First bytes of files that are no prompt files: the kind of such a file, and what to do with it.
OTHER_KINDS = {
    codecs.BOM_UTF16_LE: "UTF-16 text; save it as UTF-8",
    codecs.BOM_UTF16_BE: "UTF-16 text; save it as UTF-8",
    b"PK\x03\x04": "a zip archive; unpack it",
    **dict.fromkeys((b"\x28\xb5\x2f\xfd", b"BZh", b"\xfd7zXZ"), "packed; unpack it, or pack it with gzip"),
    **dict.fromkeys((b"ARROW1", b"\xff\xff\xff\xff"), "an Arrow file; give the folder that save_to_disk has written"),
}
TABLES = (".csv", ".tsv", ".xlsx")


def input_problems(config: Config) -> Iterator[str]:
    """Problems of the files that the configuration names, a line each."""
    yield from run_dir_problems(config)
    yield from _prompt_files(config)
    yield from code_problems(config)
    for key, grader in config.reward.graders.items():
        if grader.kind == "arithmetic" and config.data.generator != "arithmetic":
            yield f"{key}.kind = 'arithmetic' judges only data.generator = 'arithmetic'; use kind = 'math' for files"
    yield from _own_code(config)
    for agent in config.agents:
        if problem := _tokenizer_problem(agent):
            yield f"agents.{agent.name}: {problem}"
    plain = [agent.name for agent in config.agents if not agent.chat_template]
    if config.data.tools_field and plain:
        yield f"data.tools_field: tools are read by chat templates; set chat_template = true of {', '.join(plain)}"


def code_problems(config: Config, *, reads_files: bool = True) -> Iterator[str]:
    """A line for each unknown grader, option and environment; without `reads_files`, of built-in ones alone."""
    for key, grader in config.reward.graders.items():
        if ":" in grader.kind and not reads_files:
            continue
        if problem := grader_problem(grader.kind, grader.options):
            yield f"{key}.kind: {problem}"
        elif problem := option_problem(grader.kind, grader.options):
            yield f"{key}.options: {problem}"
    environment = config.conversation.environment
    is_checked = environment is not None and (reads_files or ":" not in environment)
    if is_checked and (problem := environment_problem(environment)):
        yield f"conversation.environment: {problem}"


def missing_models(config: Config) -> list[str]:
    """A line for every model folder that is described by an init table and does not exist yet."""
    return [
        f"agents.{agent.name}: model folder {agent.model} does not exist yet; `hacpo-mega init` makes it"
        for agent in config.agents
        if is_planned(agent)
    ]


def is_planned(agent: AgentConfig) -> bool:
    """True for an agent whose model `init` has yet to make."""
    return agent.init is not None and not (agent.model / "config.json").is_file()


def _own_code(config: Config) -> Iterator[str]:
    """Problems of functions and trackers that are named, the user's or packages'."""
    for key in ("advantages", "objective"):
        name = getattr(config.algorithm, key)
        if name is not None and (problem := function_problem(key, name)):
            yield f"algorithm.{key}: {problem}"
    for name in config.logging.metrics:
        if problem := own_code_problem(name):
            yield f"logging.metrics: {problem}"
    for tracker in config.logging.trackers:
        if ":" in tracker:
            if problem := tracker_problem(tracker):
                yield f"logging.trackers: {problem}"
        elif importlib.util.find_spec(tracker) is None:
            yield f"logging.trackers: {tracker!r} is not installed here; `pip install {tracker}`, or leave it out"


def _prompt_files(config: Config) -> Iterator[str]:
    fields = (("prompt_field", config.data.prompt_field), ("gold_field", config.data.gold_field))
    trained = {os.path.realpath(file) for file in config.data.files}
    for key, files in (("data.files", config.data.files), ("evaluation.files", config.evaluation.files)):
        seen: dict[str, Path] = {}
        for file in files:
            earlier = seen.setdefault(os.path.realpath(file), file)
            if key == "evaluation.files" and os.path.realpath(file) in trained:
                yield f"{key}: {file} is also in data.files; measure on prompts that are not trained"
            elif earlier is not file:
                yield f"{key}: {file} is listed before, as {earlier}; list it once"
            elif problem := _file_problem(file, fields):
                yield f"{key}: {problem}"


def _file_problem(file: Path, fields: tuple[tuple[str, str], ...]) -> str | None:
    """The problem of a prompt file, by its name and first bytes, or None."""
    if str(file).startswith("hub:"):  # read where rows are (data/reading/tables.py)
        missing = f"{file} needs the library datasets, which is not installed here; `pip install 'datasets>=4'`"
        return missing if importlib.util.find_spec("datasets") is None else None
    if (file / SAVED_STATE).is_file():  # by datasets.save_to_disk
        return None
    if (file / "dataset_dict.json").is_file():
        splits = sorted(state.parent for state in file.glob(f"*/{SAVED_STATE}"))
        return f"{file} is a data set of splits; give one of them" + (f". Nearest: {splits[0]}" if splits else "")
    if file.is_dir():
        inside = sorted(path for path in file.iterdir() if path.suffix in (".jsonl", ".parquet"))
        return f"{file} is a folder; list its files" + (f". Nearest: {inside[0]}" if inside else "")
    if not file.is_file():
        return f"{file} does not exist"
    try:
        with file.open("rb") as stream:
            start = stream.read(FIRST_BYTES)
            stream.seek(-min(len(start), len(PARQUET_MAGIC)), os.SEEK_END)
            end = stream.read()
    except OSError as error:
        return f"{file} cannot be read ({error.strerror})"
    kind = next((kind for sign, kind in OTHER_KINDS.items() if start.startswith(sign)), None)
    if file.suffix in TABLES and not start.lstrip().startswith(b"{"):
        kind = "a table by its name; a run reads JSON Lines or Parquet, which to_parquet of pandas writes"
    if kind is not None:
        return f"{file} is {kind}"
    start = start.removeprefix(codecs.BOM_UTF8).lstrip()
    if not start:
        return f"{file} is empty"
    if file.suffix == ".parquet" or start.startswith(PARQUET_MAGIC):
        return _parquet_problem(file, start, end)
    if start.startswith(b"["):
        convert = f"`hacpo-mega data convert {shlex.quote(str(file))} --out ...`"
        return f"{file} is a JSON array, needs one object per line; {convert} writes it"
    return _first_row_problem(file, start, fields)


def _parquet_problem(file: Path, start: bytes, end: bytes) -> str | None:
    if file.suffix != ".parquet":
        return f"{file} is Parquet by its first bytes, not by its name. Nearest: {file.with_suffix('.parquet')}"
    if not (start.startswith(PARQUET_MAGIC) and end == PARQUET_MAGIC):
        return f"{file} is no Parquet file, or a part of one: it needs PAR1 as its first and last four bytes"
    return None


def _first_row_problem(file: Path, start: bytes, fields: tuple[tuple[str, str], ...]) -> str | None:
    """Checks that the first row has the named fields; a row that is not JSON is left to the reader of all rows."""
    try:
        row = parse_json(start.split(b"\n", 1)[0])
    except ValueError:
        return None
    missing = [f"{name!r} (data.{key})" for key, name in fields if isinstance(row, dict) and name not in row]
    if not missing:
        return None
    has = ", ".join(map(one_line, row)) or "none"
    convert = f"`hacpo-mega data convert {shlex.quote(str(file))} --out NEW.jsonl` reads public layouts"
    return f"{file}: the first row has no field {' and no field '.join(missing)}; it has: {has}; {convert}"


def _tokenizer_problem(agent: AgentConfig) -> str | None:
    """The problem of an agent's tokenizer files, or None; before `init` there is only its table."""
    if (agent.model / "config.json").is_file():
        return tokenizer_problem(agent.model, needs_template=agent.chat_template)
    if agent.init is not None and (agent.model.is_file() or (agent.model.is_dir() and any(agent.model.iterdir()))):
        return f"model = '{agent.model}' is there and has no config.json; init makes a new folder: name one"
    if agent.init is not None and agent.chat_template:
        return "chat_template = true, but init makes a tokenizer without a template; set it to false"
    return None
