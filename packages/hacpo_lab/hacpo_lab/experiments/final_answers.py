"""The test set of an experiment: every agent answers it once when a run has ended, and one bit an answer is kept.

The evaluations of a run are for validation: they choose learning rates. The prompts of the test set are used nowhere
else, also not in a run that only tunes. Answers are greedy, as from a deployed model, and sampled at the temperature
of training, since the two can rank methods differently. Only the built-in arithmetic has such a set.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from hacpo_lab.experiments.result import GREEDY, SAMPLED, Bits, FinalAnswers
from hacpo_mega.config import Config
from hacpo_mega.data.prompts import rows_of_examples, to_prompts
from hacpo_mega.data.reading.files import digest_of
from hacpo_mega.data.tasks import examples_for_test
from hacpo_mega.records import Prompt

if TYPE_CHECKING:  # tables are made without torch
    from hacpo_mega.trainer.trainer import Trainer

FOLDER = "final_answers"


def final_prompts(config: Config) -> tuple[Prompt, ...]:
    """All prompts of the test set, skill by skill; none for a run with files of its own."""
    if config.data.generator is None:
        return ()
    return to_prompts(rows_of_examples([e for skill in config.data.skills for e in examples_for_test(skill)]))


def final_digest(prompts: Sequence[Prompt]) -> str:
    """Digest of prompts and golds, in order."""
    return digest_of([(prompt.text, prompt.gold, prompt.skill) for prompt in prompts])


def answer_test_set(trainer: "Trainer") -> None:
    """Answers the test set with the agents of a run that has ended, into files of its folder. Collective."""
    config, rollout, place = trainer.config, trainer.rollout, trainer.place
    mine = final_prompts(config)[place.rank_map.share_of_agent(place.coordinate)]
    longest = config.evaluation.max_answer_tokens or config.rollout.max_answer_tokens
    temperatures = {GREEDY: 0.0} if config.roles else {GREEDY: 0.0, SAMPLED: config.rollout.temperature}
    right: dict[str, list[str]] = {}
    for sampling, temperature in temperatures.items():
        answers = rollout.answer_once(mine, longest, config.num_steps, temperature)
        judged = zip(mine, trainer.judge.judge(mine, answers)) if place.is_leader else ()
        right[sampling] = [prompt.id for prompt, judgement in judged if judgement.is_judged and judgement.reward == 1.0]
    if place.is_leader:
        folder = config.run_dir / FOLDER
        folder.mkdir(exist_ok=True)
        file = folder / f"{rollout.name}.cell_{place.coordinate.cell}.json"
        file.write_text(json.dumps(right), encoding="utf-8")


def read_final_answers(run_dir: Path, config: Config) -> FinalAnswers | None:
    """The final answers from the files of a run's cells; None where the run answered no test set."""
    prompts, files = final_prompts(config), sorted((run_dir / FOLDER).glob("*.json"))
    if not files:
        return None
    right: dict[str, dict[str, set[str]]] = {GREEDY: {}, SAMPLED: {}}
    for file in files:
        agent = file.name.partition(".cell_")[0]
        for sampling, ids in json.loads(file.read_text(encoding="utf-8")).items():
            right[sampling].setdefault(agent, set()).update(ids)
    return FinalAnswers(
        prompts=final_digest(prompts),
        num_prompts={skill: sum(prompt.skill == skill for prompt in prompts) for skill in config.data.skills},
        greedy=dict(_bits(prompts, right[GREEDY])),
        sampled=dict(_bits(prompts, right[SAMPLED])),
    )


def _bits(prompts: Sequence[Prompt], right: Mapping[str, set[str]]) -> Iterator[tuple[str, Bits]]:
    skills = dict.fromkeys(prompt.skill for prompt in prompts)
    for agent, ids in right.items():
        by_skill = {skill: [prompt.id in ids for prompt in prompts if prompt.skill == skill] for skill in skills}
        yield agent, {skill: np.packbits(bits).tobytes().hex() for skill, bits in by_skill.items()}
