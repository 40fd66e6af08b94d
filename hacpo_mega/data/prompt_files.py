"""Whether the prompt files of a run are good, asked by the process that starts it: imports no torch and no tokenizer.

Not here: how many of the prompts every agent can read (prompt_sets.py).
"""

from hacpo_mega.config import Config
from hacpo_mega.config.checks import largest_step
from hacpo_mega.data.files import describe, read_prompts


def require_good_files(config: Config) -> None:
    """Reads every prompt file of a run. ValueError with a line per bad row, or when a step takes more than all rows.

    A prompt that is in two files, also in one to train on and one to evaluate on, is a bad row.
    """
    fields = config.data.prompt_field, config.data.gold_field, {}, config.data.tools_field  # {}: where each was met
    rows, problems = read_prompts(config.data.files, *fields)
    problems += read_prompts(config.evaluation.files, *fields)[1]
    if problems:
        raise ValueError(describe(problems))
    if config.data.files and config.training.prompts_per_step > len(rows):
        raise ValueError(
            f"training.prompts_per_step ({config.training.prompts_per_step}) takes that many different prompts, but "
            f"data.files has only {len(rows)} rows. {largest_step(config, len(rows))}"
        )
