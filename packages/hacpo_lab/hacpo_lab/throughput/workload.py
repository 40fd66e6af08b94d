"""The work of a benchmark: the length and reward of every answer, so that chance in sampling changes no measurement.

Every answer is really sampled, judged, exchanged and trained; only its length and its reward are fixed.
"""

import random
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from hacpo_mega.config import Config
from hacpo_mega.logbook.files.rollout_log import logged_steps, read_rollouts

# (agent, prompt index in the step) -> tokens and reward of its answers, in the order of their rollout index
StepAnswers = Mapping[tuple[str, int], tuple[tuple[int, float], ...]]


@dataclass(frozen=True)
class Workload:
    """Tokens and rewards of all answers; `steps` repeat when a benchmark is longer than they are.

    tokens   of every answer, where nothing is replayed; every second answer is then right
    steps    what a run recorded, step by step; empty: nothing is replayed
    unmixed  share of the prompts, spread evenly, to which all answers are wrong, so that nobody learns from them; only
             where nothing is replayed
    """

    tokens: int
    steps: tuple[StepAnswers, ...] = ()
    unmixed: float = 0.0

    def answer(self, agent: str, step: int, prompt_index: int, rollout_index: int) -> tuple[int, float]:
        """(tokens, reward) of an answer. A method that answers more often than the run takes its answers again."""
        if not self.steps:
            is_unmixed = int((prompt_index + 1) * self.unmixed) > int(prompt_index * self.unmixed)
            return self.tokens, 0.0 if is_unmixed else float(rollout_index % 2)
        recorded = self.steps[step % len(self.steps)][agent, prompt_index]
        return recorded[rollout_index % len(recorded)]


def fixed(config: Config, num_tokens: int | None) -> Workload:
    """Every answer has `num_tokens` tokens; None: half of the longest. ValueError where that is not allowed."""
    longest = config.rollout.max_answer_tokens
    if num_tokens is not None and not 1 <= num_tokens <= longest:
        raise ValueError(f"--answer-tokens ({num_tokens}) must be 1 to rollout.max_answer_tokens ({longest})")
    return Workload(num_tokens or -(-longest // 2))


def drawn(config: Config, run_dir: Path, num_steps: int) -> Workload:
    """Lengths drawn from all that a run recorded, of whatever models; every second answer is right.

    A pure function of the run, the seed and an answer's place. ValueError where the run has none that is allowed.
    """
    groups = (group for step in logged_steps(run_dir) for group in _answers_of(run_dir, step).values())
    lengths = sorted(tokens for group in groups for tokens, _ in group)
    if not lengths:
        raise ValueError(f"--lengths {run_dir}: no rollouts are there; give the folder of a run")
    if lengths[-1] > config.rollout.max_answer_tokens:
        raise ValueError(
            f"--lengths {run_dir}: its longest answer has {lengths[-1]} tokens, rollout.max_answer_tokens is "
            f"{config.rollout.max_answer_tokens}: give rollout.max_answer_tokens={lengths[-1]}"
        )

    def answers(step: int, agent: str, prompt: int) -> tuple[tuple[int, float], ...]:
        found = random.Random(f"{config.seed} {step} {agent} {prompt}").choices(lengths, k=config.answers_per_prompt)
        return tuple((tokens, float(g % 2)) for g, tokens in enumerate(found))

    prompts, names = range(config.training.prompts_per_step), [agent.name for agent in config.agents]
    steps = ({(name, p): answers(step, name, p) for name in names for p in prompts} for step in range(num_steps))
    return Workload(lengths[-1], tuple(steps))


def replayed(config: Config, run_dir: Path) -> Workload:
    """Lengths and rewards as a run recorded them. ValueError when it is not a run of such agents and prompts."""
    steps = logged_steps(run_dir)
    if not steps:
        raise ValueError(f"--replay {run_dir}: no rollouts are there; give the folder of a run")
    recorded = tuple(_answers_of(run_dir, step) for step in steps)
    wanted = {agent.name for agent in config.agents}
    for step, answers in zip(steps, recorded, strict=True):
        agents = {agent for agent, _ in answers}
        if agents != wanted:
            raise ValueError(
                f"--replay {run_dir}: recorded {len(agents)} agents ({', '.join(sorted(agents))}), the configuration "
                f"has {len(wanted)} ({', '.join(sorted(wanted))}): replay a run of the same agents"
            )
        num_prompts = len(answers) // len(agents)
        if num_prompts != config.training.prompts_per_step:
            raise ValueError(
                f"--replay {run_dir}: step {step} has {num_prompts} prompts, training.prompts_per_step is "
                f"{config.training.prompts_per_step}: give training.prompts_per_step={num_prompts}"
            )
    longest = max(tokens for answers in recorded for group in answers.values() for tokens, _ in group)
    if longest > config.rollout.max_answer_tokens:
        raise ValueError(
            f"--replay {run_dir}: its longest answer has {longest} tokens, rollout.max_answer_tokens is "
            f"{config.rollout.max_answer_tokens}: give rollout.max_answer_tokens={longest}"
        )
    return Workload(longest, recorded)


def _answers_of(run_dir: Path, step: int) -> StepAnswers:
    found: dict[tuple[str, int], list[tuple[int, float]]] = {}
    for prompt in read_rollouts(run_dir, step):
        for answer in prompt["answers"]:
            # An unjudged answer is counted as wrong: it is generated and scored all the same. An empty one has its end.
            measured = (max(1, answer["num_tokens"]), answer["reward"] or 0.0)
            found.setdefault((answer["agent"], prompt["prompt_index"]), []).append(measured)
    return {key: tuple(answers) for key, answers in found.items()}
