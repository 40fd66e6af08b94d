"""Configurations that are wrong, in groups, each with what must be said about it: one text per line, in order."""

from bad_sources import FILES, FOLDERS, REWARDS, ROW_CASES, SKILL_CASES, TOKENIZERS
from bad_values import BATCHES, LOGGING, NAMES, NOT_FINITE, NOT_TRUE, NOT_WHOLE, OUT_OF_BOUNDS, PASSED_ON, WARM_STARTS

GROUPS = {
    "not finite": NOT_FINITE,
    "not whole": NOT_WHOLE,
    "not true or false": NOT_TRUE,
    "out of bounds": OUT_OF_BOUNDS,
    "names": NAMES,
    "passed on": PASSED_ON,
    "reward": REWARDS,
    "skills": SKILL_CASES,
    "batches": BATCHES,
    "files": FILES,
    "rows": ROW_CASES,
    "tokenizer": TOKENIZERS,
    "run folder": FOLDERS,
    "warm start": WARM_STARTS,
    "logging": LOGGING,
}
