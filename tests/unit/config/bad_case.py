"""A wrong configuration, for the groups of them in bad_values.py and bad_sources.py."""

from dataclasses import dataclass

NUM_ROWS = 12
ROWS = [{"prompt": f"{i}+{i}=", "answer": str(2 * i)} for i in range(NUM_ROWS)]


@dataclass(frozen=True)
class Case:
    """`set` are overrides, `says` one text per line, `command` what is run; {here} is the folder of the fixture."""

    name: str
    set: tuple[str, ...]
    says: tuple[str, ...]
    command: tuple[str, ...] = ("check",)


def one(name: str, override: str, *says: str) -> Case:
    return Case(name, (override,), says)


def with_files(name: str, table: str, *says: str, command: tuple[str, ...] = ("check",)) -> Case:
    return Case(name, (f"data={{{table}}}",), says, command)
