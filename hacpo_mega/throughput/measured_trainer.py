"""A trainer whose answers are as long, and as right, as a workload says. Everything else is the trainer itself."""

from collections.abc import Sequence

from hacpo_mega.config import Config
from hacpo_mega.records import Judgement, Prompt, Rollout, Verdict
from hacpo_mega.throughput.workload import Workload
from hacpo_mega.trainer import Trainer


class MeasuredTrainer(Trainer):
    """Takes steps whose work is known beforehand; its metrics have `prompt_tokens_mean` of every agent, too."""

    def __init__(self, config: Config, workload: Workload) -> None:
        super().__init__(config)
        self._workload = workload
        self.agent.answer_lengths = self._length_of

    def _length_of(self, step: int, prompt_index: int, rollout_index: int) -> int:
        return self._workload.answer(self.agent.name, step, prompt_index, rollout_index)[0]

    def _judge(self, prompts: Sequence[Prompt], rollouts: Sequence[Rollout]) -> list[Judgement]:
        """Judges as ever, for its time, and takes the workload's rewards."""
        judged = super()._judge(prompts, rollouts)
        if judged:
            lengths = [len(self.agent.codec.encode_prompt(prompt.text)) for prompt in prompts]
            self.metrics.add(f"agent/{self.agent.name}/prompt_tokens_mean", sum(lengths), len(lengths))
        return [self._as_recorded(rollout) for rollout, _ in zip(rollouts, judged)]

    def _as_recorded(self, rollout: Rollout) -> Judgement:
        place = (self.agent.name, self.steps_done, rollout.prompt_index, rollout.rollout_index)
        reward = self._workload.answer(*place)[1]
        return Judgement(Verdict.CORRECT if reward > 0 else Verdict.WRONG, reward)


def take_steps(config: Config, workload: Workload, num_steps: int) -> None:
    """What one rank of a benchmark does. Collective over the job."""
    with MeasuredTrainer(config, workload) as trainer:
        for _ in range(num_steps):
            trainer.step()
