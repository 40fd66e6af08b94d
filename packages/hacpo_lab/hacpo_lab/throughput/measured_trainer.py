"""A trainer whose answers have the lengths and rewards of a workload. Everything else is the trainer itself.

It is given three parts: a sampler that fixes lengths, a judge that fixes rewards, and an observer that adds metrics of
every phase which a run does not have: processor seconds, the peak of memory, and the bytes sent, by receiver.
"""

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

from hacpo_grading.judge import is_success
from hacpo_lab.throughput.memory_peak import take_peak
from hacpo_lab.throughput.workload import Workload
from hacpo_mega.agent.rollout_client import RolloutClient
from hacpo_mega.agent.sampler import Requests, Sampler
from hacpo_mega.config import Config
from hacpo_mega.logbook.files.metrics import Metrics
from hacpo_mega.logbook.step_report import StepResult
from hacpo_mega.records import Judgement, Prompt, Rollout, Verdict
from hacpo_mega.samples.tokenizers import TextCodec
from hacpo_mega.trainer.observers import Observer
from hacpo_mega.trainer.rollout_judge import RolloutJudge
from hacpo_mega.trainer.trainer import Trainer


class WorkloadSampler(Sampler):
    """Asks for answers of the workload's lengths."""

    def __init__(self, workload: Workload, codec: TextCodec, agent: int, share: slice, config: Config) -> None:
        super().__init__(codec, agent, share, config)
        self._workload, self._name = workload, config.agents[agent].name

    def sampled(self, prompts: Sequence[Prompt], step: int) -> Requests:
        """The requests of a run, with the tokens of each answer."""
        asked = super().sampled(prompts, step)
        lengths = [self._workload.answer(self._name, step, prompt.index, g)[0] for prompt, g in asked.mine]
        return replace(asked, how=asked.how | {"lengths": lengths})


class Measurement(Observer):
    """An observer that adds metrics of an agent's steps:

    prompt_tokens_mean          tokens of a prompt      num_scored   answers that the actor scored before learning
    cpu/<phase>_s, cpu_highest/<phase>_s   processor seconds of a rank, all its threads: mean, and of the busiest one;
                                the phase `other` is outside of all
    peak/<phase>_bytes          the most memory of its fullest rank (memory_peak.py); the phase `start` is before models
    sent/<phase>/<whom>_bytes   what all its ranks have given away (cluster/groups/spans.py)
    num_written                 steps that it has seen end
    """

    def __init__(self, config: Config) -> None:
        self._counts_scores = not config.engine_scores  # else the engine has given them
        self._cpu_s: Counter[str] = Counter()
        self._cpu_began = time.process_time()
        self._start_bytes = take_peak()
        self._peaks: dict[str, int] = {}
        self.num_written = 0

    def joins(self, rollout: RolloutClient, metrics: Metrics) -> None:
        """Takes the agent whose phases it measures."""
        self.rollout, self._metrics = rollout, metrics

    @contextmanager
    def around(self, phase: str) -> Iterator[None]:
        """Measures a phase, which may come several times in a step."""
        take_peak()
        start = time.process_time()
        yield
        self._cpu_s[phase] += time.process_time() - start
        if (peak := take_peak()) is not None:
            self._peaks[phase] = max(peak, self._peaks.get(phase, 0))

    def before_writing(self, step: int, found: StepResult) -> None:
        """Adds the metrics since the last call; the cost of writing is counted in the next step."""
        self.num_written += 1
        prefix, now = f"agent/{self.rollout.name}", time.process_time()
        self._cpu_s["other"], self._cpu_began = now - self._cpu_began - sum(self._cpu_s.values()), now
        for phase, seconds in self._cpu_s.items():
            self._metrics.add(f"{prefix}/cpu/{phase}_s", seconds, 1)
            self._metrics.highest(f"{prefix}/cpu_highest/{phase}_s", seconds)
        if self._start_bytes is not None:
            self._peaks["start"] = self._start_bytes
        for phase, peak in self._peaks.items():
            self._metrics.highest(f"{prefix}/peak/{phase}_bytes", peak)
        for (phase, whom), num_bytes in self.rollout.place.spans.take_sent().items():
            self._metrics.count(f"{prefix}/sent/{phase}/{whom}_bytes", num_bytes)
        if self.rollout.place.is_leader:
            self._add_work(prefix, found)
        self._cpu_s, self._peaks = Counter(), {}

    def _add_work(self, prefix: str, found: StepResult) -> None:
        prompts = {prompt.index: prompt for prompt in found.pool.prompts}
        asked = {rollout.prompt_index: prompts[rollout.prompt_index].text for rollout in found.rollouts}
        lengths = [len(self.rollout.codec.encode_prompt(text)) for text in asked.values()]
        self._metrics.add(f"{prefix}/prompt_tokens_mean", sum(lengths), len(lengths))
        self._metrics.count(f"{prefix}/num_scored", self._counts_scores * sum(s is not None for s in found.scores))


class WorkloadJudge(RolloutJudge):
    """Judges, so that its time is measured, but gives the workload's rewards."""

    def __init__(self, workload: Workload, measurement: Measurement, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._workload, self._measurement = workload, measurement

    def judge(self, prompts: Sequence[Prompt], rollouts: Sequence[Rollout]) -> list[Judgement]:
        """One judgement per rollout."""
        return [self._as_recorded(rollout) for rollout, _ in zip(rollouts, super().judge(prompts, rollouts))]

    def _as_recorded(self, rollout: Rollout) -> Judgement:
        agent, step = self._measurement.rollout.name, self._measurement.num_written
        reward = self._workload.answer(agent, step, rollout.prompt_index, rollout.rollout_index)[1]
        return Judgement(Verdict.CORRECT if is_success(reward) else Verdict.WRONG, reward)


def measured_trainer(config: Config, workload: Workload) -> Trainer:
    """The trainer of one rank of a benchmark. Collective over the job."""
    measurement = Measurement(config)
    judge, sampler = partial(WorkloadJudge, workload, measurement), partial(WorkloadSampler, workload)
    return Trainer(config, sampler=sampler, judge=judge, observers=[measurement])


def take_steps(config: Config, workload: Workload, num_steps: int) -> None:
    """Takes the steps of one rank of a benchmark. Collective over the job."""
    with measured_trainer(config, workload) as trainer:
        for _ in range(num_steps):
            trainer.step()
