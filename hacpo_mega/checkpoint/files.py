"""A checkpoint on disk: one folder per step for all agents together, whole or not at all.

    checkpoints/step_000012/step.json      the run's own state: capability, counts, configuration; size and SHA-256
                                           of every file below
    checkpoints/step_000012/<agent>/       main weights and moments of Adam (megatron/checkpoint/sharded_state.py)
    checkpoints/step_000012.writing/       the same before its commit, which is one rename
    checkpoints/step_000012.removing/      the same while it is being removed

So a folder whose name is only `step_` and a number has been written and synced by every rank of every agent. Folders of
the other two names are never read; the next start of the run removes them.
Elsewhere: who writes and when (joint_checkpoint.py). Imports no torch, so that a wrong start is refused at once.
"""

import hashlib
import json
import os
import re
import shutil
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, TypedDict, Unpack

from hacpo_mega.config import AgentConfig, Config
from hacpo_mega.config.changes import changes, covers, effect_of, refusals, undoing_overrides, unknown_keys
from hacpo_mega.config.checks.run_dirs import require_displaceable
from hacpo_mega.config.checks.tokenizer_checks import with_times_of
from hacpo_mega.config.describe import flat
from hacpo_mega.config.load import completed
from hacpo_mega.models.files.documents import parse_json, require_file
from hacpo_mega.models.files.links import require_inside
from hacpo_mega.models.files.weight_files import weights_fingerprint

FORMAT = 2
RECORD = "step.json"
# Keys that set the held-out prompts and their rewards, and keys below them that do not.
HELD_OUT_KEYS = ("evaluation", "reward", "data.generator", "data.skills")
OTHER_KEYS = ("evaluation.every_steps", "reward.success")
COMMITTED = re.compile(r"step_(\d{6,})")
WRITING, REMOVING = ".writing", ".removing"


@dataclass(frozen=True)
class AgentState:
    """State of an agent that is not in its own files.

    num_updates   updates so far, skipped ones included, and num_applied those that were applied
    dtype         type of its model's weights, such as "bfloat16"; they are the stored float32 ones, rounded
    num_skipped   skipped updates in a row up to this step
    alarms        StepReport's state, of the leader of every cell
    """

    num_updates: int
    num_applied: int
    dtype: str
    num_skipped: int
    alarms: list[dict[str, Any]]


@dataclass(frozen=True)
class FileState:
    """Size and checksum of a file when its step was committed."""

    num_bytes: int
    sha256: str


@dataclass(frozen=True)
class Checkpoint:
    """A committed step as recorded in its step.json.

    config      the resolved configuration, as plain values      versions    of the packages that wrote it
    models      digests of the agents' config.json, by name      agents      by name
    capability  CapabilityTracker's state
    accuracy    mean reward on held-out prompts, over the agents; None where this step had no evaluation
    files       every file below `folder`, by its path there
    inputs      digests of what the run has read (logbook/run/run_inputs.py); none in a step of an older version
    """

    folder: Path
    step: int
    config: dict[str, Any]
    versions: dict[str, str]
    models: dict[str, str]
    capability: dict[str, list[list[float]]]
    accuracy: float | None
    agents: dict[str, AgentState]
    files: dict[str, FileState]
    inputs: dict[str, dict[str, str]] = field(default_factory=dict)

    @classmethod
    def parse(cls, folder: Path, text: str) -> "Checkpoint":
        """Parses the text of a step.json. ValueError if it is torn, changed, or of another format."""
        file = folder / RECORD
        try:
            table = parse_json(text)
            version, sha256, state = table["format"], table["sha256"], table["state"]
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{file} is damaged: it is no record of a checkpoint") from error
        if version != FORMAT:
            raise ValueError(f"{file} is of format {version!r}, this version of hacpo_mega reads format {FORMAT}")
        if _digest(state) != sha256:
            raise ValueError(f"{file} is damaged: it is not what was written (SHA-256 differs)")
        try:
            for agent in state["agents"].values():
                agent.pop("band", None)  # older versions wrote it
            agents = {name: AgentState(**agent) for name, agent in state.pop("agents").items()}
            files = {path: FileState(**state_of) for path, state_of in state.pop("files").items()}
            return cls(folder=folder, agents=agents, files=files, **state)
        except (TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"{file} is not a record that this version of hacpo_mega reads: {error}") from error

    def text(self) -> str:
        """The inverse of `parse`."""
        state = {key: value for key, value in asdict(self).items() if key != "folder"}
        return json.dumps({"format": FORMAT, "sha256": _digest(state), "state": state}, indent=1)

    def size_problems(self) -> Iterator[str]:
        """A line for every file that is missing or has another size; reads none of them."""
        for path, expected in self.files.items():
            file = self.folder / path
            try:
                if not file.is_file():
                    yield f"{file} is missing"
                elif (size := file.stat().st_size) != expected.num_bytes:
                    yield f"{file} is damaged: it has {size} bytes, written were {expected.num_bytes}"
            except OSError as error:
                yield _unreadable(file, error)

    def content_problems(self, share: slice = slice(None), agent: str = "") -> Iterator[str]:
        """A line for every file with bytes other than those written; reads a share of `files_of(agent)`."""
        for path, expected in self.files_of(agent)[share]:
            try:
                if file_sha256(self.folder / path) != expected.sha256:
                    yield f"{self.folder / path} is damaged: it is not what was written (SHA-256 differs)"
            except OSError as error:  # such as a bad block
                yield _unreadable(self.folder / path, error)

    def files_of(self, agent: str) -> list[tuple[str, FileState]]:
        """The files of an agent, with their paths; "": of all agents."""
        return [(path, file) for path, file in self.files.items() if not agent or path.startswith(f"{agent}/")]


def _unreadable(file: Path, error: OSError) -> str:
    return f"{file} cannot be read ({error.strerror})"


def _digest(state: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(state, sort_keys=True).encode()).hexdigest()


def file_sha256(path: Path) -> str:
    """SHA-256 of a file's bytes, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def folder_of(run_dir: Path, step: int) -> Path:
    """The path of a step's checkpoint, once committed."""
    return run_dir / "checkpoints" / f"step_{step:06d}"


def committed_steps(run_dir: Path) -> list[int]:
    """The steps with a committed checkpoint, ascending."""
    names = (path.name for path in (run_dir / "checkpoints").glob("step_*") if path.is_dir())
    return sorted(int(match[1]) for name in names if (match := COMMITTED.fullmatch(name)))


def _newest_in(run_dir: Path) -> str:
    """Hint at the newest step of `run_dir`, for an error about a run folder in place of a step; "" without one."""
    steps = committed_steps(run_dir)
    return f". Nearest: {folder_of(run_dir, steps[-1])}" if steps else ""


def require_own_step(folder: Path) -> None:
    """ValueError, one line, for a step with a link that leads out of its run; out of itself, if it is in no run."""
    path = Path(os.path.abspath(folder))
    require_inside(path.parent.parent if path.parent.name == "checkpoints" else folder, folder)


def read_checkpoint(folder: Path) -> Checkpoint:
    """A committed step. ValueError if it is none, or names the first file that is missing or has another size."""
    if folder.name.endswith((WRITING, REMOVING)):
        raise ValueError(f"{folder} is no checkpoint: it is half written, or half removed; give a folder step_N")
    try:
        require_file(folder / RECORD)
        text = (folder / RECORD).read_text(encoding="utf-8", errors="replace")
    except ValueError as error:
        raise ValueError(f"{folder / RECORD} {error}: {folder} is no checkpoint of a run") from error
    except (FileNotFoundError, NotADirectoryError) as error:
        raise ValueError(
            f"{folder / RECORD} is missing: {folder} is no checkpoint of a run{_newest_in(folder)}"
        ) from error
    except OSError as error:
        raise ValueError(_unreadable(folder / RECORD, error)) from error
    found = Checkpoint.parse(folder, text)
    if (named := COMMITTED.fullmatch(folder.name)) and int(named[1]) != found.step:
        raise ValueError(f"{folder} is step {found.step} by its {RECORD}: a copy, or renamed")
    for problem in found.size_problems():
        raise ValueError(problem)
    return found


def latest_checkpoint(
    run_dir: Path, *, last_whole: bool = False, damaged: Collection[int] = frozenset()
) -> Checkpoint | None:
    """The newest committed step, None without one. ValueError, which offers an older step, when it cannot be read.

    With `last_whole` the newest readable one that is not in `damaged`; ValueError only when none is left.
    """
    steps = [step for step in committed_steps(run_dir) if step not in damaged]
    for step in reversed(steps):
        try:
            return read_checkpoint(folder_of(run_dir, step))
        except ValueError as error:
            if not last_whole:
                raise ValueError(f"{error}. {older_step_offered(run_dir, step)}") from error
    if steps or damaged:
        raise ValueError(f"{run_dir}/checkpoints has no step that is whole: start anew with --fresh")
    return None


def set_aside(run_dir: Path, after: int, damaged: Mapping[int, str]) -> Iterator[str]:
    """Renames the committed steps after step `after`, which are all damaged, and yields a line for each.

    `damaged` has the problems of those with changed bytes; reading the others shows theirs.
    """
    for step in [step for step in committed_steps(run_dir) if step > after]:
        folder, problem = folder_of(run_dir, step), damaged.get(step)
        try:
            read_checkpoint(folder)
        except ValueError as error:
            problem = str(error)
        number, aside = 0, folder.with_name(f"damaged_{folder.name}")
        while os.path.lexists(aside):
            number, aside = number + 1, folder.with_name(f"damaged_{folder.name}.{number + 1}")
        folder.rename(aside)
        yield f"{problem}; moved to {aside}"


def older_step_offered(run_dir: Path, step: int) -> str:
    """Sentence that offers the newest step before a damaged one whose every byte is as it was written."""
    for older in reversed([older for older in committed_steps(run_dir) if older < step]):
        try:
            if not list(read_checkpoint(folder_of(run_dir, older)).content_problems()):
                move = f"move {folder_of(run_dir, step)} away to go on from there"
                return f"Step {older} is whole: {move}, or give --last-whole"
        except ValueError:
            continue
    return "No older step is whole: start anew with --fresh"


class StartOptions(TypedDict, total=False):
    """The user's choice of where a run begins.

    fresh         begins a new run, for which the content of run_dir is moved aside
    accept        keys of the configuration that may differ from the run's
    branch        committed step of any run to begin with if run_dir has none; with `fresh`, of another run_dir
    last_whole    passes over damaged steps of run_dir
    """

    fresh: bool
    accept: Sequence[str]
    branch: Path | None
    last_whole: bool


def find_start(
    config: Config, *, damaged: Collection[int] = frozenset(), **options: Unpack[StartOptions]
) -> Checkpoint | None:
    """The step that a run goes on from, None for a new run. Moves nothing.

    `damaged` are steps to pass over. ValueError, one line per problem, if the step cannot be read, the configuration is
    not the run's, or the content of run_dir could not be moved out of a new run's way.
    """
    fresh, branch, accepted = options.get("fresh", False), options.get("branch"), options.get("accept", ())
    if fresh and branch is not None and branch.resolve().is_relative_to(config.run_dir.resolve()):
        raise ValueError(
            f"--from {branch} is of {config.run_dir}, which --fresh moves aside: give the branch another run_dir, or "
            "leave --fresh out and move the later steps away"
        )
    last_whole = options.get("last_whole", False)
    found = None if fresh else latest_checkpoint(config.run_dir, last_whole=last_whole, damaged=damaged)
    if found is None:
        require_displaceable(config.run_dir)
        if branch is None:
            _require_known(accepted, config, {})
            return None
        require_own_step(branch)
        found = read_checkpoint(branch)
    found = replace(found, config=completed(found.config))
    _require_known(accepted, config, found.config)
    changed = changes(found.config, plain(with_times_of(config, found.config)))
    if lines := list(refusals(changed, accepted)):
        back = undoing_overrides(changed, accepted)
        raise ValueError("\n".join([f"{found.folder} is of another configuration:", *lines, *back]))
    digests = model_digests(config)
    for agent in config.agents:
        if digests.get(agent.name) not in (None, found.models.get(agent.name)):
            files = f"the config.json{' or a weight' if agent.lora else ''} of agents.{agent.name}.model"
            raise ValueError(f"{found.folder} is of another model: {files} is not what it was")
    if found.step > config.num_steps:
        raise ValueError(
            f"{found.folder} has {found.step} steps done, num_steps is {config.num_steps}: give more, or --fresh"
        )
    return found


def _require_known(accepted: Sequence[str], config: Config, stored: dict[str, Any]) -> None:
    """ValueError for an accepted key that neither a configuration of today nor the stored one has."""
    if accepted and (lines := list(unknown_keys(accepted, [agent.name for agent in config.agents], stored))):
        raise ValueError("\n".join(lines))


def plain(config: Config) -> dict[str, Any]:
    """The resolved configuration as a checkpoint keeps it."""
    return config.model_dump(mode="json", exclude_none=True)


def model_digests(config: Config) -> dict[str, str]:
    """SHA-256 of every agent's config.json, by name; a folder without one is refused elsewhere.

    An agent with LoRA, whose checkpoints hold its adapters alone, has a fingerprint of config.json and the weights.
    """
    with_folder = [agent for agent in config.agents if (agent.model / "config.json").is_file()]
    return {agent.name: _digest_of(agent) for agent in with_folder}


def _digest_of(agent: AgentConfig) -> str:
    return file_sha256(agent.model / "config.json") if agent.lora is None else weights_fingerprint(agent.model)


def commit(writing: Path, record: Checkpoint) -> None:
    """Makes a written step the newest committed one. Every file that it names must have been synced."""
    path = writing / RECORD
    path.write_text(record.text(), encoding="utf-8")
    for written in (path, *(writing / name for name in record.agents), writing):
        sync(written)
    writing.rename(record.folder)
    sync(record.folder.parent)


def sync(path: Path) -> None:
    """Waits until a file, or the names in a folder, are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove_old(run_dir: Path, *, keep_last: int, keep_every: int, keep_best: bool) -> list[str]:
    """Removes all but the `keep_last` newest committed steps, the multiples of `keep_every`, and the best one.

    Returns a line for every folder of which something could not be removed, now or in an earlier call; none blocks the
    others. The best step is read from the steps themselves, so a job that dies before this call has forgotten nothing.
    """
    steps, unremoved = committed_steps(run_dir), _remove_named(run_dir, REMOVING)
    best = best_step(run_dir, steps) if keep_best else None
    for step in steps[:-keep_last]:
        if step == best or (keep_every and step % keep_every == 0):
            continue
        folder = folder_of(run_dir, step)
        # Renamed first: killed in the middle, it must not look like a step.
        removing = folder.with_name(folder.name + REMOVING)
        try:
            folder.rename(removing)
        except OSError as error:
            unremoved.append(_not_removed(folder, error))
        else:
            unremoved += _remove(removing)
    return unremoved


def best_step(run_dir: Path, steps: Sequence[int]) -> int | None:
    """The committed step with the best held-out reward, the newer of equals; None where none was evaluated.

    Evaluations of other prompts, or with other rewards, than the newest one are not compared with it.
    """
    evaluated = []
    for step in steps:
        folder = folder_of(run_dir, step)
        with suppress(ValueError, OSError):  # a damaged one is no candidate
            record = Checkpoint.parse(folder, (folder / RECORD).read_text(encoding="utf-8"))
            if record.accuracy is not None:
                evaluated.append((record.accuracy, step, _held_out_set(record)))
    comparable = [(accuracy, step) for accuracy, step, held_out in evaluated if held_out == evaluated[-1][2]]
    return max(comparable, default=(0.0, None))[1]


def _held_out_set(record: Checkpoint) -> tuple[dict[str, Any], dict[str, str] | None]:
    """Keys that set the prompts and rewards behind `accuracy`, and the digests of the prompts' files."""
    table = {
        key: value
        for key, value in flat(completed(record.config))
        if any(covers(one, key) for one in HELD_OUT_KEYS) and key not in OTHER_KEYS and effect_of(key) == "results"
    }
    return table, record.inputs.get("evaluation.files")


def remove_unfinished(run_dir: Path) -> list[str]:
    """Removes what a killed run was writing or removing; returns a line for every folder that is not gone."""
    return _remove_named(run_dir, WRITING, REMOVING)


def _remove_named(run_dir: Path, *endings: str) -> list[str]:
    found = sorted(path for path in (run_dir / "checkpoints").glob("step_*") if path.name.endswith(endings))
    return [line for path in found for line in _remove(path)]


def _remove(folder: Path) -> list[str]:
    """Removes as much of a folder as possible; a line if it is not gone. NFS keeps a file that is open in it."""
    try:
        shutil.rmtree(folder)
    except OSError as error:
        shutil.rmtree(folder, ignore_errors=True)
        return [_not_removed(folder, error)] if os.path.lexists(folder) else []
    return []


def _not_removed(folder: Path, error: OSError) -> str:
    return f"{folder} cannot be removed ({error.strerror}: {error.filename}) and takes room until it can"
