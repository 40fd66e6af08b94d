"""The table of `hacpo-mega eval`, and how the words of a command line fill it: MODEL, files, key=value.

Elsewhere: what an evaluation of an agent takes from its run (settings.py).
"""

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import Field, ValidationError

from hacpo_grading.graders.registry import GRADERS
from hacpo_mega.config.load import readable_problems, set_key
from hacpo_mega.config.tables.schema import Success
from hacpo_mega.config.tables.section import Count, CountOrZero, FilePath, Flag, PassedOn, PositiveOrZero, Section

KEY = re.compile(r"[a-z_]+(\.[\w-]+)*\s*=")


class EvaluationReward(Section):
    """The judge; what is not given is the run's, or the grader's default."""

    kind: Annotated[str | None, Field(description=f"{', '.join(GRADERS)}, or file.py:function.")] = None
    options: PassedOn = Field(default_factory=dict)
    """Options of the judge, such as reward.options.rel_tol=0.01; one of another kind gets none of the run's."""
    success: Success | None = None
    """A part's name, or the least reward of a success."""
    num_workers: Count = 1
    """Grading processes of each engine."""


class EvaluationTable(Section):
    """The keys of `hacpo-mega eval`, beside model and files; what is not given is the run's, or a default."""

    suite: Literal["paper"] | None = None
    """'paper': its seven benchmarks, found in `data`."""
    data: FilePath | None = None
    """Folder with a suite's files."""
    num_answers: Count = 1
    """Answers per problem."""
    temperature: PositiveOrZero | None = None
    """0 is greedy; not given: 0 for one answer, else 1."""
    limit: Count | None = None
    """Only the first problems of each benchmark."""
    max_answer_tokens: Count | None = None
    """Longest answer."""
    max_prompt_tokens: Count | None = None
    """Longer prompts are dropped, counted."""
    chat_template: Flag | None = None
    """Apply the tokenizer's chat template."""
    chat_template_kwargs: PassedOn = Field(default_factory=dict)
    """Its arguments, such as chat_template_kwargs.enable_thinking=false."""
    system_prompt: str | None = None
    """The system message of the chat template."""
    prompt_template: str | None = None
    """Text with {prompt}, or @FILE that holds it."""
    stop_text: str | None = None
    """Judge an answer only up to this text."""
    reward: EvaluationReward = EvaluationReward()
    """The judge."""
    environment: str | None = None
    """Class that plays the other side, as conversation.environment of a run; none: a run's is left out."""
    max_turns: Count | None = None
    """Most turns of a conversation, max_answer_tokens each."""
    max_total_tokens: Count | None = None
    """Most tokens of a conversation after its prompt."""
    prompt_field: str | None = None
    """Field of a row with the prompt, in every FILE."""
    gold_field: str | None = None
    """Field of a row with the gold answer."""
    seed: CountOrZero = 0
    """Seed of sampled answers."""
    tp: Count = 1
    """Processes of one engine."""
    engines: Count = 1
    """Engines that share the problems."""


# The options that the keys were before, for one release; "KEY=VALUE" stood behind those whose key ends with a dot.
OLD_OPTIONS = {
    **{f"--{name.replace('_', '-')}": name for name in EvaluationTable.model_fields if "chat_template" not in name},
    **{"--samples": "num_answers", "-k": "num_answers", "--max-tokens": "max_answer_tokens"},
    **{"--template-arg": "chat_template_kwargs.", "--option": "reward.options.", "--reward": "reward.kind"},
    **{"--success": "reward.success", "--judges": "reward.num_workers"},
    **{"--chat-template": "chat_template=true", "--no-chat-template": "chat_template=false"},
}
TEXTS = {"data", "reward.kind"} | {n for n, f in EvaluationTable.model_fields.items() if str in get_args(f.annotation)}


def read_words(words: Sequence[str]) -> tuple[list[str], EvaluationTable, list[str]]:
    """MODEL and files; the table of the keys; a line for every old option.

    ValueError, a line per problem, for an unknown key or option and a value that is none.
    """
    places: list[str] = []
    pairs: list[str] = []
    notices: list[str] = []
    rest = iter(words)
    for word in rest:
        if word.startswith("-") and word != "-":
            pairs.append(_as_key(word, rest))
            notices.append(f"{word}: write {pairs[-1]} instead; the option goes with the next release")
        elif KEY.match(word) and not Path(word).exists():
            pairs.append(word)
        else:
            places.append(word)
    if not places:
        raise ValueError("give a model: a folder, ORG/NAME, or RUN/checkpoints/step_N/NAME")
    table: dict[str, Any] = {}
    for pair in pairs:
        set_key(table, pair)
    try:
        return places, EvaluationTable.model_validate(table), notices
    except ValidationError as error:
        raise ValueError("\n".join(readable_problems(error, table, EvaluationTable))) from error


def _as_key(word: str, rest: Iterator[str]) -> str:
    """An old option with its value, which stands behind it in `rest`, as key=value."""
    option, equals, value = word.partition("=")
    if (key := OLD_OPTIONS.get(option)) is None:
        raise ValueError(f"{option}: there is no such option; hacpo-mega eval --help lists options and keys")
    if "=" in key:
        return key
    if not equals and (value := next(rest, None)) is None:
        raise ValueError(f"{option} needs a value: write {key}=VALUE")
    if key.endswith("."):
        return key + value
    return f"{key}={json.dumps(value, ensure_ascii=False) if key in TEXTS else value}"
