"""Differences, key by key, between the configuration that a run was begun with and the one it is to go on with.

The effect of each key (none on training, on results by rounding only, on results) is decided here alone, for comparing
runs, too (hacpo_lab/experiments/identity.py). A key that no pattern names changes results.

free      changes nothing that is trained: goes through (num_steps too, though it moves the rates of a falling schedule)
asked     would make another run of it: refused, unless the user accepts this key
fixed     a run cannot have another value
"""

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Literal

from hacpo_mega.config.describe import as_toml, flat, in_a_run, keys_of, nearest_key
from hacpo_mega.config.tables.schema import Config
from hacpo_mega.models.files.documents import one_line, short
from hacpo_mega.models.sharding.layout import FIRST_STAGE, LAST_STAGE, VIRTUAL

Effect = Literal["none", "rounding", "results"]

# A pattern names a key, or a table with all that is in it.
NONE = (
    *("run_dir", "checkpoint", "logging", "slurm", "device_memory_gib", "placement", "wait_s", "reward.num_workers"),
    *("training.diagnose_every", "training.verify_weights_every"),
    *("training.score_in_first_update", "reward.while_sampling", "agents.*.recompute", "agents.*.offload"),
    "data.repeated",  # it refuses files, or takes the same rows of them
    # limits at which a run gives up change nothing in one that finishes
    *("stall_s", "reward.max_unjudged_share", "training.max_skipped_updates"),
)
# Keys that set which process computes what, and in which order it is added up.
ROUNDING = (
    *("lanes", "agents.*.cells_per_lane", "agents.*.tp", "agents.*.cp", "agents.*.ep", "agents.*.pp"),
    *("agents.*.engine_tp", "agents.*.rollout_gpus"),
    *("training.share_prompts", "agents.*.transformer", "agents.*.optimizer.kernels", "agents.*.data_parallel"),
    *(f"agents.*.megatron.{key}" for key in (FIRST_STAGE, LAST_STAGE, VIRTUAL)),
)
# Keys that change results and may change all the same: how far a run goes, and how it is looked at.
FREE = ("num_steps", "evaluation")
# Keys of adapters that fix the shapes in their checkpoint.
FIXED = ("agents", "agents.*.lora.rank", "agents.*.lora.targets")


def effect_of(key: str) -> Effect:
    """The effect of a dotted key; those of an agent are under agents.NAME."""
    for effect, patterns in (("none", NONE), ("rounding", ROUNDING)):
        if any(covers(pattern, key) for pattern in patterns):
            return effect
    return "results"


def covers(pattern: str, key: str) -> bool:
    """True if the pattern names the key or a table around it."""
    return fnmatchcase(key, pattern) or fnmatchcase(key, f"{pattern}.*")


@dataclass(frozen=True)
class Change:
    """A key with another value than before; `before` and `now` are written as in a TOML file."""

    key: str
    before: str
    now: str
    kind: Literal["free", "asked", "fixed"]

    def __str__(self) -> str:
        return f"{self.key} was {self.before}, is {self.now}"


@dataclass(frozen=True)
class OtherContent:
    """Files that a key names, with another content than before."""

    key: str
    names: tuple[str, ...]
    kind: Literal["free", "asked", "fixed"]

    def __str__(self) -> str:
        one = len(self.names) == 1 and not self.names[0].endswith("weights")
        return f"{self.key}: {', '.join(self.names)} {'is not what it was' if one else 'are not what they were'}"


def changes(before: dict[str, Any], now: dict[str, Any]) -> list[Change]:
    """Differences between two dumped configurations, in the order of the schema; agents are compared by name."""
    old, new = dict(flat(before)), dict(flat(now))
    keys = [*new, *(key for key in old if key not in new)]
    if old["agents"] != new["agents"]:  # their order counts too; nothing below compares
        keys = [key for key in keys if not key.startswith("agents.")]
    return [
        Change(key, as_toml(old.get(key)), as_toml(new.get(key)), kind_of(key))
        for key in keys
        if old.get(key) != new.get(key)
    ]


def unknown_keys(accepted: Sequence[str], agents: Sequence[str], stored: dict[str, Any]) -> Iterator[str]:
    """A line for every key that the user accepts and neither a configuration of these agents nor the stored one has."""
    before = list(dict(flat(stored)))
    known = _known_keys()
    values = [one for one in known if not any(other.startswith(f"{one}.") for other in known)]
    for key in accepted:
        if any(covers(key, one) for one in before):
            continue
        first, _, rest = key.partition(".")
        agent, _, rest = rest.partition(".") if first == "agents" else ("*", "", rest)
        pattern = ".".join(filter(None, (first, "*" if first == "agents" and rest else "", rest)))
        if "=" in key:
            yield f"--accept {short(key)}: expected a key alone. Nearest: --accept {one_line(key.partition('=')[0])}"
        elif agent and not any(fnmatchcase(name, agent) for name in agents):
            yield f"--accept {short(key)}: no agent is named {short(agent)}; there are: {', '.join(agents)}"
        elif not any(covers(pattern, one) for one in known) and not any(covers(one, pattern) for one in values):
            near = nearest_key(pattern.replace("agents.*.", "agents."))
            nearest = f"; did you mean {in_a_run(near, agent)!r}?" if near else ""
            yield f"--accept {short(key)}: unknown key{nearest}"


def _known_keys() -> list[str]:
    return [in_a_run(key).replace("NAME", "*") for key in keys_of(Config)]


def undoing_overrides(found: Sequence[Change], accepted: Sequence[str]) -> Iterator[str]:
    """A line with the overrides that undo what `refusals` asks about: a default may have changed, not the user's file.

    Keys that are gone, and values that were not given, have no override.
    """
    known = _known_keys()
    overrides = [
        f"{change.key}={change.before}"
        for change in found
        if change.kind == "asked" and change.before != as_toml(None) and any(covers(one, change.key) for one in known)
        if not any(covers(key, change.key) for key in accepted)
    ]
    if overrides:
        yield f"To go on as before, add {shlex.join(overrides)}"


def refusals(found: Sequence[Change | OtherContent], accepted: Sequence[str]) -> Iterator[str]:
    """A line for every change that does not go through; `accepted` are keys, or tables, that the user agrees to."""
    for change in found:
        if change.kind == "fixed":
            yield f"{change}: a run cannot go on with another; put it back, or start anew with --fresh"
        elif change.kind == "asked" and not any(covers(key, change.key) for key in accepted):
            yield f"{change}: go on all the same with --accept {change.key}, or start anew with --fresh"


def kind_of(key: str) -> Literal["free", "asked", "fixed"]:
    """The kind of a change of a key's value, or of the content of its files."""
    if any(fnmatchcase(key, pattern) for pattern in FIXED):
        return "fixed"
    is_free = effect_of(key) != "results" or any(covers(table, key) for table in FREE)
    return "free" if is_free else "asked"
