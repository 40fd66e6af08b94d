"""From a TOML file and `key=value` overrides to a checked, frozen Config. All complaints come at once."""

import difflib
import tomllib
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from hacpo_mega.config.checks import find_problems
from hacpo_mega.config.schema import Config


def load_config(path: str | Path, overrides: list[str] | tuple[str, ...] = ()) -> Config:
    """Reads, overrides and checks a configuration.

    An override is `section.key=value` with a TOML value; an agent is addressed by name, `*` means all of them:
    `agents.qwen.tp=2`, `agents.*.optimizer.lr=1e-6`. A value that is no TOML is taken as a string.
    Relative paths count from the current folder. Raises ValueError with one line per problem.
    """
    path = Path(path)
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror}); give the path of a TOML configuration") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: not valid TOML: {error}") from error
    for override in overrides:
        _apply(table, override)
    try:
        config = Config.model_validate(table)
    except ValidationError as error:
        raise ValueError("\n".join(f"{path}: {line}" for line in _readable(error, table))) from error
    problems = find_problems(config)
    if problems:
        raise ValueError("\n".join(f"{path}: {problem}" for problem in problems))
    return config


def _apply(table: dict[str, Any], override: str) -> None:
    """Sets one dotted key; ValueError when the text or the way to the key is off."""
    key, equals, text = override.partition("=")
    if not equals or not key:
        raise ValueError(f"override {override!r}: expected section.key=value, for example rollout.temperature=0.8")
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text
    *way, last = key.split(".")
    for place in _places(table, way, override):
        place[last] = value


def _places(table: Any, way: list[str], override: str) -> list[dict[str, Any]]:
    if not way:
        if not isinstance(table, dict):
            raise ValueError(f"override {override!r}: leads into a {type(table).__name__}, not a table")
        return [table]
    step, rest = way[0], way[1:]
    if isinstance(table, list):
        named = [entry for entry in table if isinstance(entry, dict) and step in ("*", entry.get("name"))]
        if not named:
            names = ", ".join(str(entry.get("name")) for entry in table if isinstance(entry, dict))
            raise ValueError(f"override {override!r}: no entry is named {step!r}; there are: {names}")
        return [place for entry in named for place in _places(entry, rest, override)]
    if not isinstance(table, dict):
        raise ValueError(f"override {override!r}: leads into a {type(table).__name__}, not a table")
    return _places(table.setdefault(step, {}), rest, override)


def _readable(error: ValidationError, table: dict[str, Any]) -> list[str]:
    """One line per complaint of pydantic: the key as a user writes it, what was found, what would be right."""
    lines = []
    for entry in error.errors():
        key = ".".join(_spoken(entry["loc"], table))
        if entry["type"] == "extra_forbidden":
            near = difflib.get_close_matches(str(entry["loc"][-1]), _known_keys(entry["loc"][:-1]), n=1)
            lines.append(f"{key}: unknown key" + (f"; did you mean {near[0]!r}?" if near else ""))
        elif entry["type"] == "missing":
            lines.append(f"{key}: required, not given")
        elif entry["type"] == "value_error":
            lines.append(f"{key or 'configuration'}: {entry['ctx']['error']}")
        else:
            lines.append(f"{key}: {entry['msg'][0].lower()}{entry['msg'][1:]}, found {entry['input']!r}")
    return lines


def _spoken(location: tuple[int | str, ...], table: Any) -> list[str]:
    """The path of a complaint with agents by name instead of by number."""
    words = []
    for step in location:
        table = table[step] if isinstance(table, dict | list) and _holds(table, step) else None
        named = isinstance(step, int) and isinstance(table, dict) and "name" in table
        words.append(str(table["name"]) if named else str(step))
    return words


def _holds(table: dict[str, Any] | list[Any], step: int | str) -> bool:
    return 0 <= step < len(table) if isinstance(table, list) and isinstance(step, int) else step in table


def _known_keys(location: tuple[int | str, ...]) -> list[str]:
    """The keys of the section at `location`, read from the schema."""
    section: type[BaseModel] = Config
    for step in location:
        if isinstance(step, int):
            continue
        candidates = [section.model_fields[step].annotation] if step in section.model_fields else []
        while candidates:
            candidate = candidates.pop()
            if isinstance(candidate, type) and issubclass(candidate, BaseModel):
                section = candidate
                break
            candidates += getattr(candidate, "__args__", ())
    return list(section.model_fields)
