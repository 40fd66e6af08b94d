"""`hacpo-mega config`: every field of the configuration as a table, read from the schema itself.

A field's sentence is the text under it in the schema, so the printed text is the one that readers of the code see.
"""

import difflib
import types
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from rich.console import Console, ConsoleOptions, Group, RenderResult
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from hacpo_mega.config.tables.algorithm import PRESETS, AlgorithmConfig
from hacpo_mega.config.tables.choices import SYNONYMS
from hacpo_mega.config.tables.schema import Config
from hacpo_mega.models.files.documents import SHOWN

BOUNDS = (("ge", ">="), ("gt", ">"), ("le", "<="), ("lt", "<"))
WORDS = {bool: "true or false", int: "whole number", float: "number", str: "text", Path: "path", Any: "anything"}
# Bounds that only keep a value inside a machine word are not shown.
WORD_SIZES = (2**31, 2**32)
TABLE_WIDTH = 110  # columns from which on there are tables


@dataclass(frozen=True)
class FieldDescription:
    """A field of the configuration in words. `section` and `name` make its key; a table's own fields follow it."""

    section: str
    name: str
    allowed: str
    default: str
    sentence: str

    @property
    def key(self) -> str:
        return f"{self.section}.{self.name}" if self.section else self.name


def describe_fields(table: type[BaseModel] = Config, section: str = "") -> Iterator[FieldDescription]:
    """Every field of a table and its inner tables, in the order of the schema. `NAME` stands for any key."""
    for inner, name, field in _fields(table, section):
        allowed = _allowed(field.annotation, field.metadata)
        yield FieldDescription(inner, name, allowed, _default(field), " ".join((field.description or "").split()))


def _fields(schema: type[BaseModel], section: str = "") -> Iterator[tuple[str, str, FieldInfo]]:
    """(section, name, field) of a table and its inner tables."""
    for name, field in schema.model_fields.items():
        yield section, name, field
        inner, is_named = inner_table(field.annotation)
        if inner is not None:
            yield from _fields(inner, ".".join(filter(None, (section, name, "NAME" if is_named else ""))))


def describe(key: str | None = None) -> Group:
    """The output of `hacpo-mega config KEY`: one field, a table with all its fields, or everything.

    ValueError for an unknown key, with the nearest one.
    """
    fields = list(describe_fields())
    chosen = [field for field in fields if key is None or field.key == key or field.key.startswith(f"{key}.")]
    if not chosen:
        near = nearest_key(str(key)) or next(
            iter(difflib.get_close_matches(str(key), [field.key for field in fields], n=1, cutoff=0.7)), None
        )
        hint = f"; did you mean {near!r}?" if near else ""
        raise ValueError(f"{key}: unknown key{hint} (`hacpo-mega config` lists all of them)")
    sections = dict.fromkeys(field.section for field in chosen)
    return Group(*(_Section(section, [f for f in chosen if f.section == section]) for section in sections))


def nearest_key(key: str, schema: type[BaseModel] = Config) -> str | None:
    """The existing key that an unknown `key` probably means; None if none is near.

    The same word in another table, or another trainer's word for it, is preferred to a similar spelling. Only the
    schema of a run has words of other trainers.
    """
    table, _, last = key.rpartition(".")
    word = last.lower().replace("-", "_")
    keys = list(dict.fromkeys(keys_of(schema)))
    meant = [other for other in (SYNONYMS.get(word, ()) if schema is Config else ()) if other != key]
    same = sorted((other for other in keys if other.rpartition(".")[2] == word and other != key), key=_depth)
    beside = [other for other in keys if other.rpartition(".")[0] == table]
    near = _spelt_alike(word, beside, 0.75)
    inside = [other for other in (*meant, *same) if other in beside]
    ranked = [*inside, *near, *meant, *same, *_spelt_alike(word, keys, 0.8), *_spelt_alike(word, beside, 0.6)]
    return ranked[0] if ranked else None


def _spelt_alike(word: str, keys: Collection[str], cutoff: float) -> list[str]:
    """Keys with a last part spelt nearly like a word."""
    # difflib takes seconds for a long text, and none is near to it
    names = {key.rpartition(".")[2] for key in keys} if len(word) <= SHOWN else ()
    near = difflib.get_close_matches(word, names, n=1, cutoff=cutoff)
    return sorted((key for key in keys if key.rpartition(".")[2] in near), key=_depth)


def in_a_run(key: str, agent: str = "*") -> str:
    """A key as it is written in an override, for one agent or for all."""
    return f"agents.{agent}.{key.removeprefix('agents.')}" if key.startswith("agents.") else key


def keys_of(schema: type[BaseModel]) -> Iterator[str]:
    """Every dotted key of a schema; those of an agent begin with agents."""
    return (f"{section}.{name}" if section else name for section, name, _ in _fields(schema))


def _depth(key: str) -> tuple[int, int]:
    """Sort key: number of tables around a key; keys of `init` come last."""
    return ("init" in key.split("."), key.count("."))


@dataclass(frozen=True)
class _Section:
    """A table where it has room, else a list: nothing is cut on a narrow terminal or in a pipe."""

    section: str
    fields: list[FieldDescription]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        if options.max_width >= TABLE_WIDTH:
            yield _table(self.section, self.fields)
            return
        yield Text(_title(self.section), style="bold")
        for field in self.fields:
            defaults = (f"{preset} {_of_preset(preset, field.name)}" for preset in PRESETS)
            default = ", ".join(defaults) if self.section == "algorithm" else field.default
            yield Padding(Text(f"{field.name}: {field.allowed}; default {default}", overflow="fold"), (0, 0, 0, 2))
            yield Padding(Text(field.sentence, overflow="fold"), (0, 0, 0, 6))


def _title(section: str) -> str:
    return f"[{section}]" if section else "the run, before any table"


def _table(section: str, fields: list[FieldDescription]) -> Table:
    """One section's fields; the algorithm's defaults stand side by side, one column for each preset."""
    of_presets = section == "algorithm"
    table = Table(title=Text(_title(section), style="bold"), title_justify="left", expand=True)
    table.add_column("key", no_wrap=True)
    table.add_column("value", ratio=2, overflow="fold")
    for heading in (f"preset {preset}" for preset in PRESETS) if of_presets else ("default",):
        table.add_column(heading, ratio=1, overflow="fold")
    table.add_column("what it is", ratio=5, overflow="fold")
    for field in fields:
        defaults = [_of_preset(preset, field.name) for preset in PRESETS] if of_presets else [field.default]
        cells = (Text(cell) for cell in (field.name, field.allowed, *defaults, field.sentence))
        table.add_row(*cells, style="bold" if len(set(defaults)) > 1 else None)  # where the presets differ
    return table


def _of_preset(preset: str, name: str) -> str:
    return as_toml(getattr(AlgorithmConfig(preset=preset), name))


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True)
    return "its defaults" if isinstance(value, BaseModel) else as_toml(value)


def as_toml(value: Any) -> str:
    """A value as a TOML file has it, or "not given"."""
    if value is None:
        return "not given"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple | list):
        return f"[{', '.join(map(as_toml, value))}]"
    return f'"{value}"' if isinstance(value, str | Path) else str(value)


def _allowed(kind: Any, metadata: list[Any]) -> str:
    """The values of a type in words, with the bounds of its metadata."""
    origin, inside = get_origin(kind), get_args(kind)
    if origin is Annotated:
        extra = [part for each in inside[1:] for part in (each.metadata if isinstance(each, FieldInfo) else [each])]
        return _allowed(inside[0], [*extra, *metadata])
    if origin in (Union, types.UnionType):
        return " or ".join(_allowed(part, metadata) for part in inside if part is not type(None))
    if origin is Literal:
        return " | ".join(map(str, inside))
    if origin is tuple and inside[-1] is not Ellipsis:
        return f"[{', '.join(_allowed(part, []) for part in inside)}]"
    if origin is tuple:
        return f"list of {_allowed(inside[0], [])}"
    if origin is dict or (isinstance(kind, type) and issubclass(kind, BaseModel)):
        return "table"
    found = [(sign, getattr(part, name, None)) for name, sign in BOUNDS for part in metadata]
    bounds = [f"{sign} {value:g}" for sign, value in found if value is not None and value not in WORD_SIZES]
    return ", ".join([WORDS[kind], " and ".join(bounds)] if bounds else [WORDS[kind]])


def inner_table(kind: Any) -> tuple[type[BaseModel] | None, bool]:
    """The table that a field's values are, and whether the user names its entries (`skills.add`)."""
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        return kind, False
    for part in get_args(kind):
        inner, _ = inner_table(part)
        if inner is not None:
            return inner, get_origin(kind) is dict or inner_table(part)[1]
    return None, False


def batch_arithmetic(config: Config) -> str:
    """Answers, samples and optimizer updates of a step, as lines."""
    training, group, num_agents = config.training, config.answers_per_prompt, len(config.agents)
    sources = num_agents if config.algorithm.shares_answers else 1
    return "\n".join(
        (
            f"step: {training.prompts_per_step} prompts x {group} answers = {training.prompts_per_step * group} "
            "answers per agent,",
            f"  {training.prompts_per_step * group * num_agents} in all; "
            f"{training.prompts_per_step // config.lanes} prompts per lane",
            f"update: {config.prompts_per_update} prompts x {group} answers x {sources} sources = "
            f"{config.prompts_per_update * group * sources} samples per agent;",
            f"  {config.updates_per_step} updates per step, {config.updates_per_step * config.num_steps} in the run",
        )
    )


def differing(config: Config) -> dict[str, dict[str, str]]:
    """Values that differ from the default, as in a TOML file, by table, "" before any; `agents.*` has those all agents
    share.

    The algorithm's method and preset are always there; what these two set is the default of its other keys.
    """
    algorithm, given = config.algorithm, config.model_dump(mode="json", exclude_defaults=True)
    chosen = AlgorithmConfig(method=algorithm.method, preset=algorithm.preset)
    agents = {agent.pop("name"): dict(_lines(agent)) for agent in given.pop("agents")}
    tables = {"": dict(_lines({key: value for key, value in given.items() if not isinstance(value, dict)}))}
    tables |= {name: dict(_lines(given.get(name, {}))) for name, table in config if isinstance(table, BaseModel)}
    tables["algorithm"] = {
        name: as_toml(value)
        for name, value in algorithm
        if name in ("method", "preset") or value != getattr(chosen, name)
    }
    shared = dict(set.intersection(*(set(table.items()) for table in agents.values()))) if len(agents) > 1 else {}
    first = next(iter(agents.values()))
    tables["agents.*"] = {key: value for key, value in first.items() if key in shared}
    for name, table in agents.items():
        tables[f"agents.{name}"] = {key: value for key, value in table.items() if key not in shared}
    return {name: table for name, table in tables.items() if table}


def _lines(table: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Dotted keys of a table and their values; a table that is given and says nothing else has its defaults."""
    for key, value in table.items():
        if isinstance(value, dict) and value:
            yield from _lines(value, f"{prefix}{key}.")
        elif value is not None:
            yield f"{prefix}{key}", "its defaults" if value == {} else as_toml(value)


def flat(table: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted key, value) of every entry; an agent's are under agents.NAME, and `agents` itself is their names."""
    for key, value in table.items():
        if isinstance(value, dict) and value:
            yield from flat(value, f"{prefix}{key}.")
        elif f"{prefix}{key}" == "agents":
            yield "agents", [agent["name"] for agent in value]
            for agent in value:
                yield from flat({k: v for k, v in agent.items() if k != "name"}, f"agents.{agent['name']}.")
        elif value not in ({}, None):
            yield f"{prefix}{key}", value
