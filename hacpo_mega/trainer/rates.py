"""GPU utilisation of a job: model FLOP utilisation (MFU) of learning, and answer tokens per second and GPU.

Measured only on devices whose peak is known (models/flops.py). Learning is timed around each update on the leader of a
cell, waits for other cells included and waits for a turn not.
"""

import time
from collections.abc import Sequence

import torch

from hacpo_mega.agent.agent import Agent
from hacpo_mega.cluster.machine.device import device_identity
from hacpo_mega.cluster.place import Place
from hacpo_mega.config import AgentConfig
from hacpo_mega.config.checks.checks import architecture_of
from hacpo_mega.logbook.files.metrics import Metrics
from hacpo_mega.logbook.step_report import StepResult
from hacpo_mega.models.flops import PEAK_TFLOPS, learning_flops, shared_learning_flops
from hacpo_mega.records import Sample, UpdateStats
from hacpo_mega.trainer.observers import Observer


def peak_flops(device: torch.device, dtype: torch.dtype) -> float | None:
    """Peak FLOP/s of the device in `dtype`; None if unknown."""
    if device.type != "cuda" or dtype not in (torch.bfloat16, torch.float16):
        return None
    tflops = PEAK_TFLOPS.get(torch.cuda.get_device_name(device))
    return None if tflops is None else 1e12 * tflops


def num_gpus(place: Place) -> int:
    """Number of distinct GPUs of the job. Collective over the job."""
    return len(set(place.gather_job(device_identity(place.device).encode())))


class Rates(Observer):
    """Adds the rates of every step, on the leader of a cell."""

    def __init__(self, spec: AgentConfig, place: Place, peak: float, gpus: int, *, share_prompts: bool) -> None:
        self._architecture = architecture_of(spec)
        self._lora = spec.adapters(self._architecture)
        self._name, self._share_prompts, self._gpus = spec.name, share_prompts, gpus
        self._is_leader, self._is_first = place.is_leader, place.coordinate.global_rank == 0
        self._peak_of_cell = peak * place.rank_map.agents[place.agent].training
        self._step_began = self._update_began = time.perf_counter()

    def joins(self, agent: Agent, metrics: Metrics) -> None:
        """Notes the metrics to write to."""
        self._metrics = metrics

    def before_training(self, step: int) -> None:
        """Starts the clock of the first step."""
        self._step_began = time.perf_counter()

    def before_update(self, step: int, m: int, update: Sequence[Sample]) -> None:
        """Starts the clock of an update; must come after observers that compute before an update."""
        self._update_began = time.perf_counter()

    def after_update(self, step: int, m: int, update: Sequence[Sample], stats: UpdateStats) -> None:
        """Adds the update to both utilisations."""
        if self._is_leader:
            seconds = time.perf_counter() - self._update_began
            for name in (f"agent/{self._name}", "rate"):
                self._metrics.add(f"{name}/learn_mfu", self._flops(update), seconds * self._peak_of_cell)

    def before_writing(self, step: int, found: StepResult) -> None:
        """Adds the tokens of the cell's answers, and once per job the seconds of all GPUs."""
        now = time.perf_counter()
        seconds, self._step_began = now - self._step_began, now
        if self._is_leader:
            tokens = sum(len(trajectory.rollout.token_ids) for trajectory in found.trajectories)
            gpu_seconds = seconds * self._gpus if self._is_first else 0.0
            self._metrics.add("rate/answer_tokens_per_gpu_s", tokens, gpu_seconds)

    def _flops(self, update: Sequence[Sample]) -> float:
        """Model FLOPs of one update of this cell; a prompt counts once where its answers share it."""
        if not self._share_prompts:
            lengths = (len(sample.prompt_ids) + len(sample.answer_ids) for sample in update)
            return sum(learning_flops(self._architecture, 1.0, length, self._lora) for length in lengths)
        groups: dict[int, tuple[int, list[int]]] = {}
        for sample in update:
            group = groups.setdefault(sample.prompt_index, (len(sample.prompt_ids), []))
            group[1].append(len(sample.answer_ids))
        return shared_learning_flops(self._architecture, groups.values(), self._lora)
