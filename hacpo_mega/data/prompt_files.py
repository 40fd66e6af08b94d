"""Checks of a run's prompt files, made by the process that starts the run: imports no torch and no tokenizer.

Elsewhere: how many of the prompts every agent can read (prompt_sets.py).
"""

from hacpo_mega.config import Config
from hacpo_mega.config.checks.checks import largest_step
from hacpo_mega.data.reading.files import SeenPrompts, describe, read_prompts


def require_good_files(config: Config) -> int:
    """Reads every prompt file of a run; returns the number of rows of data.files left out as repeated.

    ValueError with a line per bad row, or when a step takes more than all rows. A prompt that is in a file to train on
    and in one to evaluate on is a bad row.
    """
    seen, keep_first = SeenPrompts(), config.data.repeated == "keep_first"
    fields = config.data.prompt_field, config.data.gold_field, seen, config.data.tools_field
    rows, problems, num_repeated = read_prompts(config.data.files, *fields, keep_first=keep_first)
    problems += read_prompts(config.evaluation.files, *fields, keep_first=keep_first).problems
    if problems:
        raise ValueError(describe(problems))
    if config.data.files and config.training.prompts_per_step > len(rows):
        different = " different ones" if num_repeated else ""
        raise ValueError(
            f"training.prompts_per_step ({config.training.prompts_per_step}) takes that many different prompts, but "
            f"data.files has only {len(rows)} rows{different}. {largest_step(config, len(rows))}"
        )
    return num_repeated
