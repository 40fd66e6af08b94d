"""Which prompts a run trains on and which it is evaluated on, from its configuration.

Not here: reading rows (data/files.py), their order over steps (data/prompts.py).
"""

from collections.abc import Iterable, Sequence

from hacpo_mega.config import Config
from hacpo_mega.data.files import PromptRow, load_prompts
from hacpo_mega.data.prompts import PromptSampler, rows_of_examples, to_prompts
from hacpo_mega.data.tasks import evaluation_examples, training_examples
from hacpo_mega.data.tokenizers import TextCodec, load_tokenizer
from hacpo_mega.records import Prompt


def codecs_of(config: Config) -> tuple[TextCodec, ...]:
    """The tokenizer of every agent: all must be able to read a prompt before anybody is asked it."""
    return tuple(
        TextCodec(load_tokenizer(agent.model, agent.trust_remote_code), agent.prompting) for agent in config.agents
    )


def training_sampler(config: Config, codecs: Sequence[TextCodec]) -> tuple[PromptSampler, int]:
    """The prompts of every step, and how many rows were dropped because some agent's tokens exceed the limit."""
    if config.data.files:
        rows = load_prompts(config.data.files, config.data.prompt_field, config.data.answer_field)
    else:
        rows = rows_of_examples([e for skill in config.data.skills for e in training_examples(skill)])
    kept = within_limit(rows, codecs, config.rollout.max_prompt_tokens)
    sampler = PromptSampler(
        kept, config.seed, config.training.prompts_per_step, balance_skills=config.data.generator is not None
    )
    return sampler, len(rows) - len(kept)


def held_out_prompts(config: Config, codecs: Sequence[TextCodec]) -> tuple[Prompt, ...]:
    """The fixed evaluation set: `evaluation.files`, or the held-out arithmetic, the same number of each skill."""
    if config.evaluation.files:
        rows = load_prompts(config.evaluation.files, config.data.prompt_field, config.data.answer_field)
    elif config.data.generator is not None:
        share = config.evaluation.num_prompts // len(config.data.skills)
        rows = rows_of_examples([e for skill in config.data.skills for e in evaluation_examples(skill, share)])
    else:
        rows = ()
    return to_prompts(within_limit(rows, codecs, config.rollout.max_prompt_tokens)[: config.evaluation.num_prompts])


def within_limit(rows: Iterable[PromptRow], codecs: Sequence[TextCodec], max_tokens: int) -> tuple[PromptRow, ...]:
    """The rows that every agent can read whole: a prompt is dropped, never cut."""
    return tuple(row for row in rows if all(len(codec.encode_prompt(row.text)) <= max_tokens for codec in codecs))
