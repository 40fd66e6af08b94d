"""Reads a TOML file and `key=value` overrides into a checked, frozen Config, or the one that a run wrote.

All complaints come at once.
"""

import copy
import os
import re
import shlex
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from hacpo_mega.config.checks.checks import find_problems
from hacpo_mega.config.describe import as_toml, in_a_run, inner_table, nearest_key
from hacpo_mega.config.tables.algorithm import AlgorithmConfig
from hacpo_mega.config.tables.methods import METHODS, unread_beside, unread_options
from hacpo_mega.config.tables.schema import Config
from hacpo_mega.models.files.documents import did_you_mean, one_line, parse_toml, short, toml_file
from hacpo_mega.models.files.links import require_inside, require_inside_its_run, run_above

# Words for the value that a field takes, where pydantic would name a Python type that no TOML file has.
EXPECTED = {
    "model_type": "a table",
    "dict_type": "a table",
    "tuple_type": "a list",
    "bool_type": "true or false",
    "int_type": "a whole number",
    "float_type": "a number",
    "finite_number": "a finite number",
    "string_type": "a text",
    "path_type": "a path",
}
# The texts that a pattern of the schema takes, in words.
PATTERNS = {
    r"^[A-Za-z0-9][A-Za-z0-9_-]*$": "letters, digits, - and _, a letter or digit first",
    r"^[a-z][a-z0-9_]{0,30}$": "at most 31 small letters, digits and _, a letter first",
    r"^[A-Za-z_]\w*$": "letters, digits and _, no digit first",
    r"^\d+[KMGT]?$": "a number of megabytes, or one with K, M, G or T behind it, such as 64G",
}

# Keys of older versions that are gone, each with the value at which it changed no results; None where any value changed
# rounding only, or nothing without another of them.
GONE = {
    "training.pack_by": None,
    "rollout.biased_cut_after": 1.0,
    "algorithm.band": "fixed",
    "algorithm.band_share": None,
    "algorithm.band_smoothing": None,
}


def load_config(path: str | Path, overrides: list[str] | tuple[str, ...] = (), *, try_templates: bool = True) -> Config:
    """Reads, overrides and checks a configuration.

    An override is `section.key=value` with a TOML value; an agent is addressed by name, `*` means all of them:
    `agents.qwen.tp=2`, `agents.*.optimizer.lr=1e-6`. A value that is no TOML is taken as a string. An override of
    algorithm.method takes the file's options for another method out.
    Relative paths count from the current folder. Raises ValueError with one line per problem. A chat template is tried
    in a process of its own, which `try_templates=False` spares the ranks of a job.
    """
    config = load_unchecked(path, overrides)
    problems = find_problems(config, try_templates=try_templates)
    if problems:
        raise ValueError("\n".join(f"{path}: {problem}" for problem in problems))
    return config


def load_unchecked(path: str | Path, overrides: list[str] | tuple[str, ...] = ()) -> Config:
    """`load_config` without cross-checks: models, prompts and devices need not be on this machine (planning/)."""
    path = Path(path)
    require_inside_its_run(path)
    table = toml_file(path, "the path of a TOML configuration")
    if {"regimes", "methods"} <= table.keys():
        use = f"hacpo-mega experiment {shlex.quote(str(path))}"
        raise ValueError(f"{path}: an experiment's grid, no run's configuration: use {use}")
    if _is_of_a_run(path):
        table = _with_gone_keys(migrated(table), table)
    in_file = set(options) if isinstance(options := table.get("algorithm"), dict) else set()
    for override in overrides:
        set_key(table, override)
    _drop_options_of_another_method(table, in_file, overrides)
    try:
        return Config.model_validate(table)
    except ValidationError as error:
        raise ValueError("\n".join(f"{path}: {line}" for line in readable_problems(error, table))) from error


def _is_of_a_run(path: Path) -> bool:
    """True for a resolved configuration by its place: a run's config.toml, and that of a job of Slurm."""
    named = Path(os.path.abspath(path))
    is_of_a_job = named.parent.name == "slurm" and re.fullmatch(r"config\.\d+\.toml", named.name) is not None
    return is_of_a_job or (named.name == "config.toml" and run_above(named) == named.parent)


def set_key(table: dict[str, Any], override: str) -> None:
    """Sets one dotted key. ValueError for a text that is no override, or a key that leads to no table."""
    key, equals, text = override.partition("=")
    if key != key.strip():  # as a TOML file has it: key = value
        key, text = key.strip(), text.strip()
    if not equals or not all(key.split(".")):
        raise ValueError(f"override {short(override)}: expected section.key=value, such as rollout.temperature=0.8")
    *path, last = key.split(".")
    value = _value(text, override)
    for target in _tables_at(table, path, override):
        target[last] = copy.deepcopy(value)  # a later override may change it for one agent alone


def _value(text: str, override: str) -> Any:
    """The value that an override sets: a TOML value, or the text itself if it is none."""
    try:
        given = parse_toml(f"value = {text}")
    except tomllib.TOMLDecodeError:
        if "\n" in text or "\r" in text:
            raise ValueError(f"override {short(override)}: has several lines; give each key=value by itself") from None
        if text in ("null", "None"):  # as other trainers say that a key has no value
            remedy = f"take the key out of the file, or quote a text: '\"{text}\"'"
            raise ValueError(f"override {short(override)}: there is no {text} in TOML; {remedy}") from None
        return text
    except ValueError as error:
        raise ValueError(f"override {short(override)}: {error}") from error
    if len(given) > 1:
        raise ValueError(f"override {short(override)}: sets {len(given)} keys; give each key=value by itself")
    return given["value"]


def _drop_options_of_another_method(table: dict[str, Any], in_file: set[str], overrides: Iterable[str]) -> None:
    """Removes the options of the file that nothing reads any more once an override chooses another method, or sets an
    option beside which they are not read.

    So one file serves for every method. An option that an override gives itself stays, and is refused if it is unread.
    """
    given = {override.partition("=")[0].strip().removeprefix("algorithm.") for override in overrides}
    options = table.get("algorithm")
    if not isinstance(options, dict) or not isinstance(method := options.get("method", "hacpo"), str):
        return  # whatever else it is, the schema says so
    if method not in METHODS:
        return
    in_file &= set(AlgorithmConfig.model_fields) - given
    # All of the table's options together: one that an override gives may read what the file has.
    unread = set(unread_options(method, frozenset(options))) if "method" in given else set()
    unread |= {name for name, other in unread_beside(options).items() if other in given}
    for name in unread & in_file:
        del options[name]


def _tables_at(table: Any, path: list[str], override: str) -> list[dict[str, Any]]:
    if isinstance(table, list) and path:
        named = [entry for entry in table if isinstance(entry, dict) and path[0] in ("*", entry.get("name"))]
        if not named:
            names = ", ".join(short(entry.get("name")).strip("'") for entry in table if isinstance(entry, dict))
            raise ValueError(f"override {short(override)}: no entry is named {path[0]!r}; there are: {names}")
        return [target for entry in named for target in _tables_at(entry, path[1:], override)]
    if not isinstance(table, dict):
        is_of_agents = isinstance(table, list) and override.startswith("agents.")
        remedy = f"; write {override.replace('agents.', 'agents.*.', 1)}, or a name for *" if is_of_agents else ""
        raise ValueError(f"override {short(override)}: leads into a {type(table).__name__}, not a table{remedy}")
    return _tables_at(table.setdefault(path[0], {}), path[1:], override) if path else [table]


def readable_problems(error: ValidationError, table: dict[str, Any], schema: type[BaseModel] = Config) -> list[str]:
    """One line per complaint of pydantic: the key as a user writes it, the value found, and a right value."""
    entries = error.errors()
    # A list whose entries are bad also counts as too short, since pydantic leaves bad entries out of it.
    holds_bad = {entry["loc"][:length] for entry in entries for length in range(len(entry["loc"]))}
    lines = []
    for entry in entries:
        if entry["type"] == "too_short" and entry["loc"] in holds_bad:
            continue
        key = ".".join(_named_path(entry["loc"], table))
        problem = _unknown_key(entry["loc"], key, schema) if entry["type"] == "extra_forbidden" else ""
        lines.append(f"{key or 'configuration'}: {problem or _complaint(entry, schema)}")
    return lines


def _unknown_key(location: tuple[int | str, ...], key: str, schema: type[BaseModel]) -> str:
    """Complaint about an unknown key, with the probable one: by its name alone if it is in the same table."""
    path = ".".join(str(step) for step in location if not isinstance(step, int))
    if path in GONE:
        return "removed, since it gained nothing (CHANGELOG.md). Leave it out"
    near = nearest_key(path, schema)
    if near is None:
        return "unknown key"
    table, _, name = near.rpartition(".")
    if table == path.rpartition(".")[0]:
        return f"unknown key; did you mean {name!r}?"
    agent = key.split(".")[1] if key.startswith("agents.") and near.startswith("agents.") else "*"
    return f"unknown key; did you mean {in_a_run(near, agent)!r}?"


def _complaint(entry: ErrorDetails, schema: type[BaseModel]) -> str:
    kind, location, context = entry["type"], entry["loc"], entry.get("ctx", {})
    if kind == "missing":
        return "required, not given"
    if kind == "value_error":
        return str(context["error"])
    found = f"found {short(entry['input'])}"
    if kind == "literal_error":
        known = re.findall("'(.*?)'", context["expected"])
        return f"must be {context['expected']}, {found}{did_you_mean(entry['input'], known)}"
    if kind == "too_short":
        return f"needs {_needed(entry)}, {found}"
    if kind in EXPECTED or kind == "string_pattern_mismatch":
        return f"needs {_needed(entry)}, {found}{_default(location, schema)}"
    bound = next((context[name] for name in ("ge", "le") if name in context), None)
    nearest = _default(location, schema) if bound is None else f". Nearest: {bound}"
    return f"{entry['msg'][0].lower()}{entry['msg'][1:]}, {found}{nearest}"


def _needed(entry: ErrorDetails) -> str:
    """The values a field takes, by the complaint about the value it was given."""
    kind, context = entry["type"], entry.get("ctx", {})
    if kind == "too_short":
        return f"at least {context['min_length']} of them"
    if kind == "string_pattern_mismatch":
        return PATTERNS.get(context["pattern"], f"a text of the pattern {context['pattern']}")
    return EXPECTED[kind]


def _default(location: tuple[int | str, ...], schema: type[BaseModel]) -> str:
    """The default of the field at `location`, as the end of a line."""
    field = _section(location[:-1], schema).model_fields.get(str(location[-1]))
    if field is None or not isinstance(field.default, bool | int | float | str | tuple):
        return ""
    return f"; the default is {as_toml(field.default)}"


def _named_path(location: tuple[int | str, ...], table: Any) -> list[str]:
    """The path of a complaint with agents by name instead of by number."""
    words = []
    for step in location:
        if step == "[key]":  # pydantic's word for "the key itself is wrong"
            continue
        table = table[step] if isinstance(table, dict | list) and _holds(table, step) else None
        named = isinstance(step, int) and isinstance(table, dict) and "name" in table
        words.append(one_line(str(table["name"] if named else step)))
    return words


def _holds(table: dict[str, Any] | list[Any], step: int | str) -> bool:
    return isinstance(step, int) and 0 <= step < len(table) if isinstance(table, list) else step in table


def _section(location: tuple[int | str, ...], schema: type[BaseModel]) -> type[BaseModel]:
    """The table of the schema that holds `location`."""
    section = schema
    for step in location:
        if step in section.model_fields:
            section = inner_table(section.model_fields[step].annotation)[0] or section
    return section


def config_of_run(run_dir: Path) -> Config:
    """The resolved configuration that a run wrote. ValueError when the folder is none of a run, or the file is broken.

    Unlike `load_config` it looks at no model and no data file: the run is over, and they may be gone.
    """
    file = run_dir / "config.toml"
    require_inside(run_dir, file)
    if not file.exists():
        raise ValueError(f"{run_dir} has no config.toml: give the run_dir of a run")
    return config_of_table(toml_file(file, "the run_dir of a run"), file)


def config_of_table(table: dict[str, Any], file: Path) -> Config:
    """The resolved configuration that `file` holds as a table. ValueError, which names the file, when it is none."""
    try:
        return Config.model_validate(migrated(table))
    except ValidationError as error:
        lines = readable_problems(error, table)
        raise ValueError("\n".join(f"{file} is not the configuration of a run: {line}" for line in lines)) from error


def migrated(table: dict[str, Any]) -> dict[str, Any]:
    """A stored configuration without the keys of older versions that are gone, and with those that have moved.

    algorithm.success_reward is reward.success now; at 1 it was the default, as reward.success is where it is not given.
    Options that nothing reads get today's defaults: older versions took other values, or had other defaults.
    """
    for key in GONE:
        name, _, last = key.partition(".")
        if isinstance(section := table.get(name), dict):
            table = table | {name: {other: value for other, value in section.items() if other != last}}
    algorithm, reward = table.get("algorithm"), table.get("reward", {})
    if not isinstance(algorithm, dict) or not isinstance(reward, dict):
        return table
    method, known = str(algorithm.get("method", "hacpo")), frozenset(algorithm) & AlgorithmConfig.model_fields.keys()
    unread = unread_options(method, known) if method in METHODS else ()
    gone = {"success_reward", *unread_beside(algorithm), *unread}
    kept = {key: value for key, value in algorithm.items() if key not in gone}
    before = algorithm.get("success_reward", 1.0)
    return table | {"algorithm": kept} | ({} if before == 1.0 else {"reward": reward | {"success": before}})


def completed(table: dict[str, Any]) -> dict[str, Any]:
    """A stored configuration as plain values under today's keys.

    Keys that its version did not have get their defaults, with which a run does what it did before.
    """
    try:
        known = Config.model_validate(migrated(table)).model_dump(mode="json", exclude_none=True)
    except ValidationError:  # a key that is gone since: `changes` names it
        return table
    return _with_gone_keys(known, table)


def _with_gone_keys(known: dict[str, Any], table: dict[str, Any]) -> dict[str, Any]:
    """`known` with the keys of `table` that are gone and changed results: `changes` or the schema names them."""
    for key, harmless in GONE.items():
        name, _, last = key.partition(".")
        section = table.get(name)
        before = section.get(last, harmless) if isinstance(section, dict) else harmless
        if harmless is not None and before != harmless:
            known = known | {name: known[name] | {last: before}}
    return known
