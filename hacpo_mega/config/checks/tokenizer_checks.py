"""Checks that every agent's tokenizer fits its model and that its chat template shows all it is given, by files alone.

A template may read the clock: its time is that of the run's first start, in UTC, unless agents.chat_template_time sets
another. Rank 0 reads it once; from then on it is a key of the run's configuration, in config.toml and in every step,
for resume and evaluation. Random draws of a template follow from the messages (models/files/chat_template.py).
Elsewhere: the rules of the files (models/files/tokenizer_files.py), and the real tokenizer (samples/tokenizers.py).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hacpo_mega.config.tables.agents import AgentConfig
from hacpo_mega.config.tables.prompting import TRIALS
from hacpo_mega.config.tables.schema import Config
from hacpo_mega.models.files.answer_ends import QUESTION, AnswerEnds, answer_ends, chats_with_answer, written_ends
from hacpo_mega.models.files.chat_template import DRAWS, draws, names_in, reads_clock, render, render_closed
from hacpo_mega.models.files.documents import one_line
from hacpo_mega.models.files.folder import named_ends, tokenizer_problem
from hacpo_mega.models.files.tokenizer_files import (
    chat_template,
    folder_digest,
    other_templates,
    special_tokens,
    token_problem,
    token_texts,
)


def tokenizer_problems(
    agent: AgentConfig, vocab_size: int, try_template: bool, tools_field: str | None
) -> Iterator[str]:
    """Problems of the tokenizer of an agent whose model has `vocab_size` tokens, a line each."""
    if tokenizer_problem(agent.model, needs_template=agent.chat_template):  # reported by the checks of inputs
        return
    if problem := token_problem(agent.model, vocab_size):
        yield problem
    elif agent.chat_template and try_template:
        yield from _template_problems(agent, tools_field)


def _template_problems(agent: AgentConfig, tools_field: str | None) -> Iterator[str]:
    prompting = agent.prompting
    try:
        entry = chat_template(agent.model)
        variables = {**special_tokens(agent.model), **prompting.template_kwargs}
    except ValueError as problem:
        yield str(problem)
        return
    if entry is None:
        return
    file, template = entry
    try:
        texts = render(template, [prompting.messages(probe) for probe in TRIALS], variables, prompting.time)
        problem = prompting.template_problem(template, texts) or time_problem(agent)
        if tools_field and "tools" not in names_in(template):
            problem = problem or f"never reads tools; leave data.tools_field ({tools_field!r}) out for this model"
    except ValueError as error:
        problem = str(error)
    if problem:
        yield f"the chat template of {file} {problem}"


def several_tokenizers(names: Sequence[str]) -> str:
    """The line for agents of different tokenizers under a method that compares others' answers token by token."""
    return (
        f"algorithm.ratio_level: 'token' of method 'f_tis' compares token log-probs of one text under two agents, and "
        f"{', '.join(names)} have different tokenizers. Nearest: 'sequence'"
    )


def one_tokenizer_problem(config: Config) -> Iterator[str]:
    """The line of `several_tokenizers`, as far as files tell (samples/learner_view.py compares the tokenizers)."""
    if not config.algorithm.needs_one_tokenizer:
        return
    try:
        digests = [folder_digest(agent.model) for agent in config.agents]
    except ValueError:  # reported as a problem of its agent
        return
    if len(set(filter(None, digests))) > 1:
        yield several_tokenizers([agent.name for agent in config.agents])


def template_notes(agents: Sequence[AgentConfig]) -> Iterator[str]:
    """A line for each agent whose chat template adds an end of answers, reads the clock, draws, or is not used."""
    for agent in agents:
        if not (agent.model / "config.json").is_file() or tokenizer_problem(agent.model, agent.chat_template):
            continue
        if agent.chat_template:
            ends, texts = folder_ends(agent)
            if line := ends.added_line(lambda number, texts=texts: one_line(texts.get(number, str(number)))):
                yield f"{agent.name}: {line}"
            yield from steadiness_notes(agent)
        elif _has_template(agent.model):
            yield (
                f"{agent.name} has a chat template that is not used: its prompts are plain text; chat_template = true "
                "asks it inside the template"
            )


def _has_template(folder: Path) -> bool:
    try:
        return chat_template(folder) is not None
    except ValueError:  # one that cannot be read is no matter where none is used
        return False


def folder_ends(agent: AgentConfig) -> tuple[AnswerEnds, dict[int, str]]:
    """The ends of an agent by its folder's files alone, and the text of each control token.

    A run finds them with the tokenizer itself (samples/tokenizers.py). A template or tokenizer that is Python code of
    the folder is not read here.
    """
    folder, special = agent.model, special_tokens(agent.model)
    control = token_texts(folder, named_ends(folder)[1])
    ids = {text: number for number, text in control.items()}
    found = chat_template(folder) if agent.chat_template else None
    written: tuple[int, ...] = ()
    if found is not None and ids:
        chats = chats_with_answer(agent.prompting.messages(QUESTION))
        variables = {**special, **agent.prompting.template_kwargs}
        texts = render_closed(found[1], chats, variables, agent.prompting.time)
        written = written_ends(texts, ids)
    eos, bos = (ids.get(special.get(key, "")) for key in ("eos_token", "bos_token"))
    return answer_ends(folder, eos, written, bos), control


def steadiness_notes(agent: AgentConfig) -> Iterator[str]:
    """A line for each thing that an agent's chat template reads or draws beside its messages."""
    file, template = _used_template(agent) or (None, "")
    if reads_clock(template):
        time = agent.chat_template_time
        stands = f"it stands at {time} UTC" if time else "it stands, in UTC, at the time of the run's first start"
        yield f"{agent.name}: the chat template of {file} reads the clock (strftime_now): {stands}, also after a resume"
    if draws(template):
        yield (
            f"{agent.name}: the chat template of {file} draws at random ({' or '.join(sorted(DRAWS))}): equal messages "
            "always get equal draws"
        )


def time_problem(agent: AgentConfig) -> str | None:
    """The problem of a chat_template_time that the agent's template does not read."""
    if agent.chat_template_time is None or _reads_clock(agent):
        return None
    return f"reads no clock: remove chat_template_time ({agent.chat_template_time!r})"


def with_times_of(config: Config, before: Mapping[str, Any]) -> Config:
    """The configuration with the times of a stored one, for agents that are given none."""
    stored = [agent for agent in before.get("agents", ()) if isinstance(agent, dict)]
    times = {agent.get("name"): agent.get("chat_template_time") for agent in stored}
    return _with_times(config, lambda agent: times.get(agent.name) if _reads_clock(agent) else None)


def with_times(config: Config, time: str) -> Config:
    """The configuration with `time` for agents whose template reads a clock that is not yet fixed."""
    return _with_times(config, lambda agent: time if _reads_clock(agent) else None)


def lacks_time(config: Config) -> bool:
    """True if a template of the configuration reads a clock that is not yet fixed."""
    return any(agent.chat_template_time is None and _reads_clock(agent) for agent in config.agents)


def _with_times(config: Config, time_of: Callable[[AgentConfig], str | None]) -> Config:
    times = [agent.chat_template_time or time_of(agent) for agent in config.agents]
    if times == [agent.chat_template_time for agent in config.agents]:
        return config
    agents: Sequence[AgentConfig] = tuple(
        agent.model_copy(update={"chat_template_time": time}) for agent, time in zip(config.agents, times, strict=True)
    )
    return config.model_copy(update={"agents": agents})


def _reads_clock(agent: AgentConfig) -> bool:
    found = _used_template(agent)
    return found is not None and reads_clock(found[1])


def _used_template(agent: AgentConfig) -> tuple[Any, str] | None:
    """The file of an agent's chat template, if there is one, and its text, with that of named ones."""
    found = chat_template(agent.model) if agent.chat_template and agent.model.is_dir() else None
    return None if found is None else (found[0], "\n".join([found[1], *other_templates(agent.model)]))
