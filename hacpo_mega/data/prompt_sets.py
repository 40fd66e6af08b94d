"""Which prompts a run trains on and which it is evaluated on, from its configuration.

`fits` says whether every agent can read a text whole: a prompt is dropped, never cut.
Not here: reading rows (files.py), their order over steps (prompts.py), and tokenizers (samples/).
"""

from collections.abc import Callable

from hacpo_mega.config import Config
from hacpo_mega.data.files import load_prompts
from hacpo_mega.data.prompts import PromptSampler, rows_of_examples, to_prompts
from hacpo_mega.data.tasks import evaluation_examples, training_examples
from hacpo_mega.records import Prompt


def training_sampler(config: Config, fits: Callable[[str], bool]) -> tuple[PromptSampler, int]:
    """The prompts of every step, and how many rows were dropped because their text does not fit every agent."""
    if config.data.files:
        rows = load_prompts(config.data.files, config.data.prompt_field, config.data.gold_field)
    else:
        rows = rows_of_examples([e for skill in config.data.skills for e in training_examples(skill)])
    kept = tuple(row for row in rows if fits(row.text))
    training = config.training
    sampler = PromptSampler(
        kept,
        config.seed,
        training.prompts_per_step,
        training.prompts_per_update,
        balance_skills=config.data.generator is not None,
    )
    return sampler, len(rows) - len(kept)


def held_out_prompts(config: Config, fits: Callable[[str], bool]) -> tuple[Prompt, ...]:
    """The fixed evaluation set: `evaluation.files`, or the held-out arithmetic, the same number of each skill."""
    if config.evaluation.files:
        rows = load_prompts(config.evaluation.files, config.data.prompt_field, config.data.gold_field)
    elif config.data.generator is not None:
        share = config.evaluation.num_prompts // len(config.data.skills)
        rows = rows_of_examples([e for skill in config.data.skills for e in evaluation_examples(skill, share)])
    else:
        rows = ()
    return to_prompts([row for row in rows if fits(row.text)][: config.evaluation.num_prompts])
