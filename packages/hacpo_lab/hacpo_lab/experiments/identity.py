"""The things that runs must have in common before they are compared, as digests of contents, not of names.

A digest is the first 16 hexadecimal digits of a SHA-256.
"""

import functools
from pathlib import Path
from typing import Any

from hacpo_lab.experiments.result import Identity
from hacpo_mega.config import Config, RewardConfig
from hacpo_mega.config.changes import effect_of
from hacpo_mega.config.describe import flat
from hacpo_mega.data.prompt_sets import held_out_prompts
from hacpo_mega.data.reading.files import data_digest, digest_of, file_digest
from hacpo_mega.logbook.run.run_inputs import own_code


def identity_of(config: Config) -> Identity:
    """Reads model and data files of a configuration. ValueError when it has no held-out prompts to read."""
    return Identity(
        config=digest_of(_method_settings(config)),
        held_out=digest_of(_evaluation_settings(config)),
        models=model_digests(config),
    )


def model_digests(config: Config) -> dict[str, str]:
    """Digest of every agent's model folder, by its name; "absent" for one that is not made yet."""
    return {agent.name: folder_digest(agent.model) if agent.model.is_dir() else "absent" for agent in config.agents}


@functools.cache
def folder_digest(folder: Path) -> str:
    """The digest of a model folder's files: names and bytes. Read once per process: a model may have many gigabytes."""
    files = sorted(path for path in folder.iterdir() if path.is_file() and not path.name.startswith("."))
    return digest_of([(file.name, file_digest(file)) for file in files])


def _method_settings(config: Config) -> dict[str, Any]:
    """All that changes results by more than a layout's rounding, except the seed and the learning rate of a grid.

    Models are compared by their own digests, wherever they lie.
    """
    table = {
        key: value
        for key, value in flat(config.model_dump(mode="json"))
        if effect_of(key) == "results" and key != "seed" and not key.endswith((".optimizer.lr", ".model"))
    }
    return {**table, "training_files": [data_digest(file) for file in config.data.files], **own_code(config)}


def _evaluation_settings(config: Config) -> dict[str, Any]:
    # Unlimited: which prompts are too long for an agent follows from its tokenizer, a part of its model folder.
    prompts, _ = held_out_prompts(config, lambda texts, _most: [0] * len(texts))
    return {
        "prompts": [(prompt.text, prompt.gold, prompt.skill) for prompt in prompts],
        "max_prompt_tokens": config.rollout.max_prompt_tokens,
        "max_answer_tokens": config.evaluation.max_answer_tokens or config.rollout.max_answer_tokens,
        "reward": _reward(config.reward),
        **{key: files for key, files in own_code(config).items() if not key.startswith("algorithm.")},
    }


def _reward(reward: RewardConfig) -> dict[str, Any]:
    """The settings of a reward that change judgements.

    Keys that are younger than stored results are left out at their default, or these would be of another identity.
    """
    younger = {name for name in ("range", "parts") if getattr(reward, name) == getattr(RewardConfig(), name)}
    without_effect = {"num_workers", "max_unjudged_share", "while_sampling"}
    return reward.model_dump(mode="json", exclude=without_effect | younger)
