"""Digests of a run's inputs beside its configuration: a resumed run is refused if they have changed.

    data.files, evaluation.files    every byte of a file; the rows of a data set of the Hub
    agents.NAME.model               every byte of tokenizer, templates and generation_config.json, and with kl_coef a
                                    fingerprint of the weights, from which the KL is measured (weight_files.py)
    reward, algorithm, conversation.environment   the files of the user's own code, and @FILE in a judge's options

A checkpoint keeps them under the keys with which --accept takes a change. Elsewhere: the configuration itself
(config/changes.py), config.json and the base of adapters, which no run goes on without (checkpoint/files.py).
"""

from collections.abc import Collection, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Unpack

from hacpo_mega.checkpoint.files import Checkpoint, StartOptions, find_start
from hacpo_mega.config import AgentConfig, Config
from hacpo_mega.config.changes import OtherContent, kind_of, refusals
from hacpo_mega.config.user_code import source_of
from hacpo_mega.data.reading.files import data_digest, file_digest
from hacpo_mega.models.files.folder import text_files
from hacpo_mega.models.files.hub import HubModel
from hacpo_mega.models.files.weight_files import weights_fingerprint

# Digests by the key that names a file or folder, then by the file's name.
Inputs = dict[str, dict[str, str]]
WEIGHTS = "the weights"
FEW_BLOCKS = 8  # of a large file, which every node reads


def start_with_same_inputs(
    config: Config, *, damaged: Collection[int] = frozenset(), **how: Unpack[StartOptions]
) -> Checkpoint | None:
    """`find_start`. ValueError, a line per key, also for inputs that differ from the step's, unless accepted."""
    found = find_start(config, damaged=damaged, **how)
    changed = [] if found is None else input_changes(found, config)
    if lines := list(refusals(changed, how.get("accept", ()))):
        raise ValueError("\n".join([f"{found.folder} is of other contents:", *lines]))
    return found


def input_changes(start: Checkpoint, config: Config) -> list[OtherContent]:
    """Inputs that a run would read otherwise than the run of `start`. Files that only one of the two names are left to
    the comparison of keys."""
    if not start.inputs:  # a checkpoint of an older version has none
        return []
    now, found = run_inputs(config), []
    for key, before in start.inputs.items():
        is_folder = key.endswith(".model")  # its files are named by no configuration, so each of them counts
        names = before.keys() | now.get(key, {}).keys() if is_folder else before.keys() & now.get(key, {}).keys()
        changed = [name for name in sorted(names) if before.get(name) != now[key].get(name)] if key in now else []
        if WEIGHTS in changed and not {WEIGHTS} <= before.keys() & now[key].keys():
            changed.remove(WEIGHTS)  # kl_coef began or ended
        if changed:
            found.append(OtherContent(key, tuple(changed), kind_of(key)))
    return found


def run_inputs(config: Config) -> Inputs:
    """Inputs that exist; the reader of a file says why it cannot be read."""
    inputs: Inputs = {
        "data.files": _file_digests(config.data.files),
        "evaluation.files": _file_digests(config.evaluation.files),
    }
    for agent in config.agents:
        inputs[f"agents.{agent.name}.model"] = _model_digests(agent, weights=config.algorithm.kl_coef > 0.0)
    return {key: files for key, files in (inputs | own_code(config)).items() if files}


def run_contents(config: Config) -> Inputs:
    """`run_inputs`, and a coarse fingerprint of the weights of every local model folder that has some."""
    inputs = run_inputs(config)
    for agent in config.agents:
        if HubModel.of_snapshot(agent.model) is None and any(agent.model.glob("*.safetensors")):
            weights = {WEIGHTS: weights_fingerprint(agent.model, num_blocks=FEW_BLOCKS)}
            inputs[f"agents.{agent.name}.model"] = inputs.get(f"agents.{agent.name}.model", {}) | weights
    return inputs


def own_code(config: Config) -> Inputs:
    """Digests of the user's own code for rewards, advantages, objectives and conversations, by file or module."""
    inputs: Inputs = {}
    for key, name, file in _user_files(config):
        with suppress(OSError):
            inputs.setdefault(key, {})[name] = file_digest(file)
    return inputs


def _user_files(config: Config) -> Iterator[tuple[str, str, Path]]:
    """(key, name, file): modules by name, since nodes may have them in other folders."""
    named = [(f"algorithm.{key}", getattr(config.algorithm, key)) for key in ("advantages", "objective")]
    named.append(("conversation.environment", config.conversation.environment))
    for key, grader in config.reward.graders.items():
        named.append((f"{key}.kind", grader.kind))
        texts = (value for value in grader.options.values() if isinstance(value, str))
        files = (text.removeprefix("@") for text in texts if text.startswith("@"))
        yield from ((f"{key}.options", str(Path(file)), Path(file)) for file in files)
    for key, name in named:
        if name is not None and ":" in name and (file := source_of(name)[0]) is not None:
            yield key, str(Path(name.rpartition(":")[0])), file


def _file_digests(files: tuple[Path, ...]) -> dict[str, str]:
    found = {}
    for file in files:
        with suppress(OSError, ValueError):
            found[str(file)] = data_digest(file)
    return found


def _model_digests(agent: AgentConfig, *, weights: bool) -> dict[str, str]:
    """Digests the text files of a model folder, and its `weights`; the base of adapters is compared by find_start."""
    found = {path.relative_to(agent.model).as_posix(): file_digest(path) for path in text_files(agent.model)}
    if weights and agent.lora is None and found:
        found[WEIGHTS] = weights_fingerprint(agent.model)
    return found
