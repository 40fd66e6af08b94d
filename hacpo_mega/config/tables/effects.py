"""Effect of each key of a configuration: none on training, on results by rounding only, or on results.

Decided here alone, for resuming a run (changes.py) and for comparing runs (hacpo_lab/experiments/identity.py). A key
that no pattern names changes results.
"""

import fnmatch
from collections.abc import Iterator
from typing import Any, Literal

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
# Who computes what, and in which order it is added up.
ROUNDING = (
    *("lanes", "agents.*.cells_per_lane", "agents.*.tp", "agents.*.cp", "agents.*.ep", "agents.*.pp"),
    *("agents.*.engine_tp", "agents.*.rollout_gpus"),
    *("training.share_prompts", "agents.*.transformer", "agents.*.optimizer.kernels", "agents.*.data_parallel"),
    *(f"agents.*.megatron.{key}" for key in (FIRST_STAGE, LAST_STAGE, VIRTUAL)),
)


def effect_of(key: str) -> Effect:
    """The effect of a dotted key; those of an agent are under agents.NAME."""
    for effect, patterns in (("none", NONE), ("rounding", ROUNDING)):
        if any(covers(pattern, key) for pattern in patterns):
            return effect
    return "results"


def covers(pattern: str, key: str) -> bool:
    """True if the pattern names the key or a table around it."""
    return fnmatch.fnmatchcase(key, pattern) or fnmatch.fnmatchcase(key, f"{pattern}.*")


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
