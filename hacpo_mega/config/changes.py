"""What differs between the configuration that a run was begun with and the one it is to go on with, key by key.

free      changes nothing that is trained: goes through (num_steps too, though it moves the rates of a falling schedule)
asked     would make another run of it: refused, unless the user accepts this key
fixed     a run cannot have another value
"""

import fnmatch
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from hacpo_mega.models.layout import FIRST_STAGE, LAST_STAGE

# A pattern names a key, or a table with all that is in it.
FREE = (
    *("run_dir", "num_steps", "evaluation", "checkpoint", "logging", "reward.num_workers", "device_memory_gib"),
    *("training.diagnose_every", "training.verify_weights_every", "placement"),
    *("training.score_in_first_update", "reward.while_sampling"),
    # who computes what: changes results by rounding
    *("lanes", "agents.*.cells_per_lane", "agents.*.tp", "agents.*.pp", "agents.*.engine_tp"),
    *("agents.*.recompute", "agents.*.offload", "agents.*.transformer", "agents.*.data_parallel", "training.pack_by"),
    *(f"agents.*.megatron.{key}" for key in (FIRST_STAGE, LAST_STAGE)),
    *("stall_s", "wait_s", "reward.max_unjudged_share", "training.max_skipped_updates"),
    "slurm",
)
FIXED = ("agents",)


@dataclass(frozen=True)
class Change:
    """A key whose value is another one now; `before` and `now` as a TOML file would say them."""

    key: str
    before: str
    now: str
    kind: Literal["free", "asked", "fixed"]

    def __str__(self) -> str:
        return f"{self.key} was {self.before}, is {self.now}"


def changes(before: dict[str, Any], now: dict[str, Any]) -> list[Change]:
    """What differs between two dumped configurations, in the order of the schema; agents are compared by name."""
    old, new = dict(_flat(before)), dict(_flat(now))
    keys = [*new, *(key for key in old if key not in new)]
    if old["agents"] != new["agents"]:  # their order counts too; nothing below compares
        keys = [key for key in keys if not key.startswith("agents.")]
    return [
        Change(key, _said(old.get(key)), _said(new.get(key)), _kind(key))
        for key in keys
        if old.get(key) != new.get(key)
    ]


def refusals(found: Sequence[Change], accepted: Sequence[str]) -> Iterator[str]:
    """A line for every change that does not go through; `accepted` are keys, or tables, that the user agrees to."""
    for change in found:
        if change.kind == "fixed":
            yield f"{change}: a run cannot go on with another; put it back, or start anew with --fresh"
        elif change.kind == "asked" and not any(_covers(key, change.key) for key in accepted):
            yield f"{change}: go on all the same with --accept {change.key}, or start anew with --fresh"


def _kind(key: str) -> Literal["free", "asked", "fixed"]:
    if key in FIXED:
        return "fixed"
    return "free" if any(_covers(table, key) for table in FREE) else "asked"


def _covers(table: str, key: str) -> bool:
    return fnmatch.fnmatchcase(key, table) or fnmatch.fnmatchcase(key, f"{table}.*")


def _flat(table: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted key, value) of every entry; an agent's are under agents.NAME, and `agents` itself is their names."""
    for key, value in table.items():
        if isinstance(value, dict) and value:
            yield from _flat(value, f"{prefix}{key}.")
        elif f"{prefix}{key}" == "agents":
            yield "agents", [agent["name"] for agent in value]
            for agent in value:
                yield from _flat({k: v for k, v in agent.items() if k != "name"}, f"agents.{agent['name']}.")
        elif value not in ({}, None):
            yield f"{prefix}{key}", value


def _said(value: Any) -> str:
    if value is None:
        return "not given"
    return str(value).lower() if isinstance(value, bool) else f'"{value}"' if isinstance(value, str) else str(value)
