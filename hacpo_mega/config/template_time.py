"""Chat templates that read the clock or draw at random, and the fixed time of a run's templates.

The time is that of the run's first start, in UTC, unless agents.chat_template_time sets another. Rank 0 reads it once;
from then on it is a key of the run's configuration, in config.toml and in every step, for resume and evaluation. Random
draws of a template follow from the messages (models/files/chat_template.py).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from hacpo_mega.config.tables.agents import AgentConfig
from hacpo_mega.config.tables.schema import Config
from hacpo_mega.models.files.chat_template import DRAWS, draws, reads_clock
from hacpo_mega.models.files.tokenizer_files import chat_template, other_templates


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
