"""Names that a configuration may use and other rooms give a meaning to, with the facts about them that are needed here.

`data/tasks.py` makes the prompts of every skill; tests hold that it agrees with this list. Elsewhere: the graders
(hacpo_grading/graders/registry.py).
"""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Literal

TRACKERS = ("wandb", "trackio", "swanlab", "mlflow", "comet_ml")

Skill = Literal["add", "sub", "mul", "srt", "sum", "chain"]


@dataclass(frozen=True)
class SkillSize:
    """Number of different prompts of a skill to train on, and of those held out for evaluation."""

    num_training: int
    num_held_out: int


SKILLS: Mapping[Skill, SkillSize] = {
    "add": SkillSize(4867, 1601),
    "sub": SkillSize(2457, 826),
    "mul": SkillSize(420, 150),
    "srt": SkillSize(6138, 1877),
    "sum": SkillSize(5992, 2005),
    "chain": SkillSize(5724, 1948),
}

_WORDS = tomllib.loads(Path(__file__).with_name("words.toml").read_text(encoding="utf-8"))
# The keys that a word of another trainer means.
SYNONYMS: Mapping[str, tuple[str, ...]] = {
    word: tuple(key for key, words in _WORDS.items() if word in words) for word in chain(*_WORDS.values())
}
