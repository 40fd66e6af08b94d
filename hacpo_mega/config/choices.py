"""Names that a configuration may say and that other rooms give a meaning to, with what must be known of them here.

`grading/kinds.py` has a grader for every reward kind and `data/tasks.py` makes the prompts of every skill; tests hold
that they agree with these lists.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

# Every kind of judge with the options that it has.
REWARD_KINDS: Mapping[str, tuple[str, ...]] = {
    "math": ("relative",),
    "math_any": ("relative",),
    "number": ("rel_tol", "abs_tol"),
    "choice": (),
    "json": (),
    "program": ("graded", "isolated", "cpu_s", "memory_mb", "num_processes", "output_kb"),
    "exact": (),
    "arithmetic": (),
    "model": ("url", "model", "template", "max_tokens", "attempts", "request_s", "api_key_env", "cache", "extra_body"),
}
# Of them those whose reward is 0 or 1.
BINARY_KINDS = ("math", "math_any", "choice", "exact", "arithmetic")

TRACKERS = ("wandb", "trackio", "swanlab", "mlflow", "comet_ml")

Skill = Literal["add", "sub", "mul", "srt", "sum"]


@dataclass(frozen=True)
class SkillSize:
    """How many different prompts of a skill there are to train on, and how many are held out for evaluation."""

    num_training: int
    num_held_out: int


SKILLS: Mapping[Skill, SkillSize] = {
    "add": SkillSize(6445, 1655),
    "sub": SkillSize(3269, 826),
    "mul": SkillSize(570, 150),
    "srt": SkillSize(8010, 1990),
    "sum": SkillSize(7925, 2075),
}
