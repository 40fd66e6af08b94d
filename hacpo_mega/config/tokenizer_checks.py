"""Whether every agent's tokenizer fits its model and its chat template reads what it is given, by files alone.

Not here: the rules of the files (models/tokenizer_files.py), and the real tokenizer (samples/tokenizers.py).
"""

from collections.abc import Iterator

from hacpo_mega.config.agents import AgentConfig
from hacpo_mega.config.prompting import TRIALS
from hacpo_mega.models.chat_template import names_in, render
from hacpo_mega.models.folder import tokenizer_problem
from hacpo_mega.models.tokenizer_files import chat_template, special_tokens, token_problems


def tokenizer_problems(
    agent: AgentConfig, vocab_size: int, try_template: bool, tools_field: str | None
) -> Iterator[str]:
    """What is wrong with the tokenizer of an agent whose model has `vocab_size` tokens, a line each."""
    if tokenizer_problem(agent.model, needs_template=agent.chat_template):  # which is said where inputs are checked
        return
    problems = token_problems(agent.model, vocab_size)
    yield from problems
    if agent.chat_template and try_template and not problems:
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
        texts = render(template, [prompting.messages(probe) for probe in TRIALS], variables)
        problem = prompting.template_problem(template, texts)
        if tools_field and "tools" not in names_in(template):
            problem = problem or f"never reads tools; leave data.tools_field ({tools_field!r}) out for this model"
    except ValueError as error:
        problem = str(error)
    if problem:
        yield f"the chat template of {file} {problem}"
