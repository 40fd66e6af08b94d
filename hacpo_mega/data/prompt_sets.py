"""Training and evaluation prompts of a run, from its configuration.

`num_tokens` gives the length of each text for the agent that needs most tokens; it may stop counting beyond its limit.
A prompt beyond rollout.max_prompt_tokens is left out, never cut. Elsewhere: reading rows (files.py), their order over
steps (prompts.py), and tokenizers (samples/).
"""

from collections.abc import Callable, Sequence
from pathlib import Path

from hacpo_mega.config import Config
from hacpo_mega.data.prompts import PromptSampler, rows_of_examples, to_prompts
from hacpo_mega.data.reading.files import PromptRow, SeenPrompts, load_prompts, read_prompts
from hacpo_mega.data.tasks import evaluation_examples, training_examples
from hacpo_mega.records import Prompt

NumTokens = Callable[[Sequence[str], int], list[int]]
MOST_COUNTED = 2**15  # tokens of a prompt that a message counts; the exact length of megabytes helps nobody


def training_sampler(config: Config, num_tokens: NumTokens) -> tuple[PromptSampler, int]:
    """The prompts of every step, and the number of rows left out because an agent needs too many tokens for them.

    ValueError when the rest is too few for a step.
    """
    rows = training_rows(config)
    kept = _short_enough(rows, config.data.files, config, num_tokens)
    by_skill = config.data.generator is not None
    for skill in config.data.skills if by_skill else (None,):
        needed = config.training.prompts_per_step // (len(config.data.skills) if by_skill else 1)
        _require_enough(rows, kept, needed, skill, config.rollout.max_prompt_tokens, num_tokens)
    sampler = PromptSampler(
        kept, config.seed, config.training.prompts_per_step, config.prompts_per_update, balance_skills=by_skill
    )
    return sampler, len(rows) - len(kept)


def training_rows(config: Config) -> tuple[PromptRow, ...]:
    """Every row to train on, however long. ValueError with a line per bad one."""
    if config.data.files:
        return _load(config, config.data.files)
    return rows_of_examples([e for skill in config.data.skills for e in training_examples(skill)])


def held_out_prompts(config: Config, num_tokens: NumTokens) -> tuple[tuple[Prompt, ...], int]:
    """The fixed evaluation set, and the number of rows that it leaves out, as too long or beyond its size:
    `evaluation.files`, or the held-out arithmetic, the same number of each skill.

    ValueError when there are prompts, but not one that every agent can read.
    """
    if config.evaluation.files:
        rows = _load(config, config.evaluation.files)
    elif config.data.generator is not None:
        share = config.evaluation.num_prompts // len(config.data.skills)
        rows = rows_of_examples([e for skill in config.data.skills for e in evaluation_examples(skill, share)])
    else:
        return (), 0
    kept = _short_enough(rows, config.evaluation.files, config, num_tokens)
    _require_enough(rows, kept, 1, None, config.rollout.max_prompt_tokens, num_tokens)
    prompts = to_prompts(kept[: config.evaluation.num_prompts])
    return prompts, len(rows) - len(prompts)


def left_out_line(num_left_out: int) -> str:
    """Words for the rows that `held_out_prompts` leaves out."""
    return f"{num_left_out} left out (evaluation.num_prompts, rollout.max_prompt_tokens)"


def _short_enough(
    rows: Sequence[PromptRow], files: Sequence[Path], config: Config, num_tokens: NumTokens
) -> tuple[PromptRow, ...]:
    most, fields = config.rollout.max_prompt_tokens, (config.data.prompt_field, config.data.gold_field)

    def place_of(index: int) -> str:
        """File and line of a row; found by reading the files again, so for a message alone."""
        seen = SeenPrompts()
        read_prompts(files, *fields, seen, config.data.tools_field, keep_first=True)
        first = seen.first_row(rows[index].id, "", "")
        return f"prompt {index + 1}" if first is None else first.place

    lengths = prompt_lengths(rows, most, num_tokens, place_of)
    return tuple(row for row, length in zip(rows, lengths, strict=True) if length <= most)


def prompt_lengths(
    rows: Sequence[PromptRow], most: int, num_tokens: NumTokens, place_of: Callable[[int], str]
) -> list[int]:
    """Number of tokens of each row. ValueError, one line that begins with the place of the row, for the first row that
    a tokenizer or a chat template refuses."""
    texts = [row.text for row in rows]
    try:
        return num_tokens(texts, most)
    except ValueError:
        start, end = 0, len(texts)  # the first bad row is among these
    while end - start > 1:
        middle = (start + end) // 2
        try:
            num_tokens(texts[start:middle], most)
            start = middle
        except ValueError:
            end = middle
    try:
        num_tokens(texts[start:end], most)
    except ValueError as error:
        raise ValueError(f"{place_of(start)}: {error}") from error
    raise AssertionError("no row alone is refused")


def _load(config: Config, files: Sequence[Path]) -> tuple[PromptRow, ...]:
    fields = config.data.prompt_field, config.data.gold_field, config.data.tools_field
    return load_prompts(files, *fields, keep_first=config.data.repeated == "keep_first")


def _require_enough(
    rows: Sequence[PromptRow],
    kept: Sequence[PromptRow],
    needed: int,
    skill: str | None,
    max_tokens: int,
    num_tokens: NumTokens,
) -> None:
    """ValueError if fewer than `needed` rows (of a skill) are kept although there are that many."""
    rows, kept = ([row for row in all_rows if skill in (None, row.skill)] for all_rows in (rows, kept))
    if len(kept) >= needed or len(rows) < needed:
        return
    counted = max(max_tokens, MOST_COUNTED)
    lengths = sorted(num_tokens([row.text for row in rows], counted))
    shortest, nearest = (f"more than {counted}" if n > counted else n for n in (lengths[0], lengths[needed - 1]))
    of_skill = "" if skill is None else f" of {skill!r}"
    raise ValueError(
        f"rollout.max_prompt_tokens ({max_tokens}) leaves {len(kept)} of {len(rows)} prompts{of_skill}, and {needed} "
        f"are needed; the shortest has {shortest} tokens for some agent. Nearest: {nearest}"
    )
