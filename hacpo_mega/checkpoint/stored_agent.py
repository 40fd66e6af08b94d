"""One agent of a committed step, for use while its run goes on or after it: `export` and `eval`.

    RUN/checkpoints/step_000020/NAME

The step holds the weights; architecture, tokenizer and chat template are those of the model folder that the run began
with, as the run's own export takes them. The run may remove the step at any time (checkpoint.keep_last).
Elsewhere: the weights themselves (megatron/checkpoint/stored_state.py). Imports no torch.
"""

import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from hacpo_mega.checkpoint.files import (
    RECORD,
    Checkpoint,
    committed_steps,
    folder_of,
    model_digests,
    read_checkpoint,
    require_own_step,
)
from hacpo_mega.config import AgentConfig, Config, config_of_table
from hacpo_mega.models.files.links import require_own_model


@dataclass(frozen=True)
class StoredAgent:
    """An agent as `checkpoint` has it; `config` is the run's at that step, `agent` its table there."""

    checkpoint: Checkpoint
    config: Config
    agent: AgentConfig

    @property
    def folder(self) -> Path:
        """The folder of its state."""
        return self.checkpoint.folder / self.agent.name

    @property
    def file(self) -> Path:
        """The file of its run's configuration."""
        return self.checkpoint.folder / RECORD

    @property
    def dtype(self) -> str:
        """The type of the run's weights, such as "bfloat16"."""
        return self.checkpoint.agents[self.agent.name].dtype

    @property
    def fingerprint(self) -> str:
        """A hash of its state, from the step's record of its files."""
        files = self.checkpoint.files_of(self.agent.name)
        text = "".join(f"{path} {file.sha256}\n" for path, file in files)
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()

    def require_unaltered(self, share: slice = slice(None)) -> None:
        """Reads a share of its files. ValueError for one with bytes other than those written."""
        for problem in self.checkpoint.content_problems(share, self.agent.name):
            raise ValueError(problem)

    def require_own_model(self) -> None:
        """ValueError for a link out of the model folder that the step names: its target would be shown and exported."""
        require_own_model(self.agent.model, Path(os.path.realpath(self.checkpoint.folder)).parent.parent)

    @contextmanager
    def being_read(self) -> Iterator[None]:
        """Context for its readers: ValueError when the run removes the step meanwhile."""
        try:
            yield
        except (OSError, ValueError) as error:
            if (self.checkpoint.folder / RECORD).exists():
                raise
            raise ValueError(
                f"{self.checkpoint.folder} was removed while it was read: its run keeps checkpoint.keep_last steps. "
                f"{_other_steps(self.checkpoint.folder)}"
            ) from error


def stored_agent(folder: Path, name: str | None) -> StoredAgent:
    """The agent `name` of a committed step, which may be None if the run has one agent; reads none of its state.

    ValueError, one line, when the folder is no committed step or not whole, for an unknown agent, and when the model
    folder is gone or another one.
    """
    require_own_step(folder)
    try:
        found = read_checkpoint(folder)
    except ValueError as error:
        raise ValueError(f"{error}. {_other_steps(folder)}") from error
    config = config_of_table(found.config, folder / RECORD)
    agent = chosen_agent(config, name, folder)
    digest = model_digests(config).get(agent.name)
    if digest != found.models[agent.name]:
        problem = "is not there" if digest is None else "is not what it was"
        files = "config.json or a weight" if agent.lora else "config.json"
        raise ValueError(
            f"{folder} has the weights of {agent.name}, {agent.model} the architecture and the tokenizer, but its "
            f"{files} {problem}: put it back (a relative path is looked for from the current folder)"
        )
    return StoredAgent(found, config, agent)


def stored_agent_at(path: Path) -> StoredAgent | None:
    """The agent of RUN/checkpoints/step_N/NAME, None for another path. ValueError as `stored_agent`."""
    if is_checkpoint(path):
        require_own_step(path)
        agents = ", ".join(str(path / name) for name in read_checkpoint(path).agents)
        raise ValueError(f"{path} holds all agents of a run: give one of them, {agents}")
    is_model = (path / "config.json").is_file()
    return stored_agent(path.parent, path.name) if is_checkpoint(path.parent) and not is_model else None


def is_checkpoint(path: Path) -> bool:
    """True if a path is, or by its name would be, a step of a run; another trainer's step is a model folder."""
    path = path.resolve()
    named = path.parent.name == "checkpoints" and path.name.startswith("step_")
    return (path / RECORD).is_file() or (named and not (path / "config.json").is_file())


def chosen_agent(config: Config, name: str | None, where: Path) -> AgentConfig:
    """The table of an agent; `name` may be None if there is one agent. ValueError, naming them all, for any other."""
    names = [agent.name for agent in config.agents]
    if name is None and len(names) > 1:
        raise ValueError(f"{where} trained {', '.join(names)}: say which one with --agent")
    if name is not None and name not in names:
        raise ValueError(f"{where} has no agent {name!r}; there are: {', '.join(names)}")
    return config.agents[0 if name is None else names.index(name)]


def _other_steps(folder: Path) -> str:
    """Sentence on the other steps of the run, for an error about `folder`."""
    folder = folder.resolve()
    run_dir = folder.parent.parent
    others = [str(step) for step in committed_steps(run_dir) if folder_of(run_dir, step) != folder]
    return f"Other steps there: {', '.join(others)}" if others else "There is no other step"
