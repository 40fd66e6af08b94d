"""A trainer whose answers are as long, and as right, as a workload says. Everything else is the trainer itself.

It also says of every phase, which a run does not: processor seconds, the peak of memory, what was sent to whom.
"""

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from hacpo_mega.config import Config
from hacpo_mega.lab.throughput.measure import CAPABILITY
from hacpo_mega.lab.throughput.memory_peak import take_peak
from hacpo_mega.lab.throughput.workload import Workload
from hacpo_mega.logbook.metrics import StepMetrics
from hacpo_mega.records import Judgement, Prompt, Rollout, Score, Verdict
from hacpo_mega.trainer.trainer import Trainer


class MeasuredTrainer(Trainer):
    """Takes steps whose work is known beforehand. Its metrics have more of every agent:

    prompt_tokens_mean          tokens of a prompt      num_scored   answers that the actor scored before learning
    cpu/<phase>_s, cpu_highest/<phase>_s   processor seconds of a rank, all its threads: mean, and of the busiest one;
                                the phase `capability` is a part of `exchange`, `other` is outside of all
    peak/<phase>_bytes          the most memory of its fullest rank (memory_peak.py); the phase `start` is before models
    sent/<phase>/<whom>_bytes   what all its ranks have given away (cluster/spans.py)
    """

    def __init__(self, config: Config, workload: Workload) -> None:
        self._cpu_s: Counter[str] = Counter()
        self._cpu_began = time.process_time()
        self._start_bytes = take_peak()
        self._peaks: dict[str, int] = {}
        super().__init__(config)
        self._workload = workload
        self.agent.answer_lengths = self._length_of
        self._score, self.agent.scoring.before_learning = self.agent.scoring.before_learning, self._score_and_count

    @contextmanager
    def _phase(self, phase: str, when: str = "") -> Iterator[None]:
        take_peak()
        with self._on_cpu(phase), super()._phase(phase, when):
            yield
        if (peak := take_peak()) is not None:
            self._peaks[phase] = max(peak, self._peaks.get(phase, 0))

    @contextmanager
    def _on_cpu(self, phase: str) -> Iterator[None]:
        start = time.process_time()
        yield
        self._cpu_s[phase] += time.process_time() - start

    def _score_and_count(self, *asked: Any) -> list[Score | None]:
        scores = self._score(*asked)
        if self.place.is_leader:
            is_asked = not self.config.rollout.one_step_off
            num_scored = sum(score is not None for score in scores) * is_asked
            self.metrics.count(f"agent/{self.agent.name}/num_scored", num_scored)
        return scores

    def _means_over_lanes(self, rewards_PNG: Tensor) -> tuple[Tensor, Tensor]:
        with self._on_cpu(CAPABILITY):
            return super()._means_over_lanes(rewards_PNG)

    def _write_metrics(self, step: int) -> StepMetrics:
        prefix, now = f"agent/{self.names[self.place.agent]}", time.process_time()
        in_phases = sum(self._cpu_s.values()) - self._cpu_s[CAPABILITY]
        self._cpu_s["other"], self._cpu_began = now - self._cpu_began - in_phases, now
        for phase, seconds in self._cpu_s.items():
            self.metrics.add(f"{prefix}/cpu/{phase}_s", seconds, 1)
            self.metrics.highest(f"{prefix}/cpu_highest/{phase}_s", seconds)
        if self._start_bytes is not None:
            self._peaks["start"] = self._start_bytes
        for phase, peak in self._peaks.items():
            self.metrics.highest(f"{prefix}/peak/{phase}_bytes", peak)
        for (phase, whom), num_bytes in self.place.spans.take_sent().items():
            self.metrics.count(f"{prefix}/sent/{phase}/{whom}_bytes", num_bytes)
        self._cpu_s, self._peaks = Counter(), {}
        return super()._write_metrics(step)

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
