"""Checks that every agent's tokenizer fits its model and that its chat template shows all it is given, by files alone.

Not here: the rules of the files (models/files/tokenizer_files.py), and the real tokenizer (samples/tokenizers.py).
"""

from collections.abc import Iterator, Sequence
from pathlib import Path

from hacpo_mega.config.tables.agents import AgentConfig
from hacpo_mega.config.tables.prompting import TRIALS
from hacpo_mega.config.template_time import steadiness_notes, time_problem
from hacpo_mega.models.files.answer_ends import QUESTION, AnswerEnds, answer_ends, chats_with_answer, written_ends
from hacpo_mega.models.files.chat_template import names_in, render, render_closed
from hacpo_mega.models.files.documents import one_line
from hacpo_mega.models.files.folder import named_ends, tokenizer_problem
from hacpo_mega.models.files.tokenizer_files import chat_template, special_tokens, token_problem, token_texts


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
        found = chat_template(agent.model)
        variables = {**special_tokens(agent.model), **prompting.template_kwargs}
    except ValueError as problem:
        yield str(problem)
        return
    if found is None:
        return
    file, template = found
    try:
        texts = render(template, [prompting.messages(probe) for probe in TRIALS], variables, prompting.time)
        problem = prompting.template_problem(template, texts) or time_problem(agent)
        if tools_field and "tools" not in names_in(template):
            problem = problem or f"never reads tools; leave data.tools_field ({tools_field!r}) out for this model"
    except ValueError as error:
        problem = str(error)
    if problem:
        yield f"the chat template of {file} {problem}"


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

    A run finds them with the tokenizer itself (samples/tokenizers.py). Nothing is told of a template or tokenizer
    that is Python code of the folder.
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
