"""Observers of a run: gradients, weights, held-out answers, GPU rates, users' own numbers. Called at moments of a step.

An observer may measure, write metrics, track state, and end the run. It changes no answer, no sample and no update.
Every rank calls every observer, in the order in which they are listed.
"""

import inspect
import json
import math
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial
from typing import Any, SupportsFloat

import torch

from hacpo_mega.agent.agent import Agent
from hacpo_mega.agent.rollout_client import RolloutClient
from hacpo_mega.cluster.groups.job_groups import device_identity
from hacpo_mega.cluster.place import Place
from hacpo_mega.config import AgentConfig, Config
from hacpo_mega.config.checks.checks import architecture_of
from hacpo_mega.config.user_code import named_function
from hacpo_mega.logbook.console import warn
from hacpo_mega.logbook.files.metrics import Metrics
from hacpo_mega.logbook.files.trackers import Trackers
from hacpo_mega.logbook.step_report import StepReport, StepResult
from hacpo_mega.logbook.steps.step_metrics import add_diagnosis, add_held_out
from hacpo_mega.models.flops import PEAK_TFLOPS, learning_flops, shared_learning_flops
from hacpo_mega.records import Pool, Prompt, Sample, Trajectory, UpdateStats
from hacpo_mega.trainer.phases import Phases
from hacpo_mega.trainer.rollout_judge import RolloutJudge

REPORT_POLL_S = 5.0  # between two messages of rank 0, which waits for a report, to the other ranks


class Observer:
    """Base class with the moments of a run; an observer overrides those that it needs. `step` counts from 1."""

    def around(self, _phase: str) -> AbstractContextManager[None]:
        """Context around every phase, from loading on."""
        return nullcontext()

    def joins(self, rollout: RolloutClient, metrics: Metrics) -> None:
        """Called once, with the rollout side of the agent to observe, and the metrics to write to."""

    def before_training(self, step: int) -> None:
        """Called when the agents are built; `step` is the first to come."""

    def before_update(self, step: int, m: int, update: Sequence[Sample]) -> None:
        """Called before update `m` of the step, from 0."""

    def after_update(self, step: int, m: int, update: Sequence[Sample], stats: UpdateStats) -> None:
        """Called after update `m`."""

    def after_learning(self, step: int, updates: Sequence[UpdateStats]) -> None:
        """Called after all updates of the step."""

    def after_publishing(self, step: int) -> None:
        """Called when the engine has the new weights."""

    def before_writing(self, step: int, result: StepResult) -> None:
        """Called when the step is complete, before it is written."""


class Observers:
    """Several observers as one: a method of `Observer`, called here, is called on each of them in order."""

    def __init__(self, observers: Sequence[Observer]) -> None:
        self._all = tuple(observers)

    def __getattr__(self, method: str) -> Callable[..., None]:
        """Function that calls this method of every observer; AttributeError for a name that `Observer` lacks."""
        getattr(Observer, method)
        return partial(self._call, method)

    def _call(self, method: str, *arguments: Any) -> None:
        for observer in self._all:
            getattr(observer, method)(*arguments)


class GradientDiagnosis(Observer):
    """Compares the gradients of own and others' answers in every update of every n-th step."""

    def __init__(self, every: int, agent: Agent, metrics: Metrics, phase: Phases,
                 names: Sequence[str]) -> None:  # fmt: skip
        self._every, self._agent = every, agent
        self._metrics, self._phase, self._names = metrics, phase, tuple(names)

    def before_update(self, step: int, m: int, update: Sequence[Sample]) -> None:
        """Measures the gradients; the agent is bit-identical afterwards. Collective over the agent's ranks."""
        if step % self._every:
            return
        with self._phase("diagnose"):
            products = self._agent.diagnose(update, m, step)
        if self._agent.rollout.place.is_leader:
            add_diagnosis(self._metrics, products, self._agent.index, self._names)


class WeightVerification(Observer):
    """Ends the run if an engine's weights differ from its actor's."""

    def __init__(self, every: int, rollout: RolloutClient, phase: Phases) -> None:
        """Checks before training, and after every n-th step; 0 checks before training only."""
        self._every, self._rollout, self._phase = every, rollout, phase

    def before_training(self, step: int) -> None:
        """Checks the weights. Collective over the cell."""
        self._verify(f"before step {step}")

    def after_publishing(self, step: int) -> None:
        """Checks the weights if it is due. Collective over the cell."""
        if self._every and step % self._every == 0:
            self._verify()

    def _verify(self, when: str = "") -> None:
        with self._phase("verify", when):
            self._rollout.verify_weights()


class HeldOutEvaluation(Observer):
    """Greedy answers to the held-out prompts, which the agent's cells share among themselves."""

    def __init__(self, config: Config, held_out: Sequence[Prompt], rollout: RolloutClient, judge: RolloutJudge,
                 metrics: Metrics, report: StepReport, phase: Phases) -> None:  # fmt: skip
        place = rollout.place
        self._config, self._rollout, self._judge = config, rollout, judge
        self._metrics, self._report, self._phase = metrics, report, phase
        self._mine = held_out[place.rank_map.share_of_agent(place.coordinate)]
        self._max_tokens = config.evaluation.max_answer_tokens or config.rollout.max_answer_tokens
        self._is_on = bool(held_out)

    def before_training(self, step: int) -> None:
        """Evaluates before a run's first step."""
        if step == 1:
            self._evaluate(0, "before step 1")

    def after_publishing(self, step: int) -> None:
        """Evaluates every n-th step, and after the last one."""
        every = self._config.evaluation.every_steps
        if step == self._config.num_steps or (every and step % every == 0):
            self._evaluate(step)

    def _evaluate(self, step: int, when: str = "") -> None:
        if not self._is_on:
            return
        with self._phase("evaluate", when):
            answers = self._rollout.answer_once(self._mine, self._max_tokens, step)
            judgements = self._judge.judge(self._mine, answers)
        if self._rollout.place.is_leader:
            graded = self._config.reward.may_be_graded or self._rollout.environment_rewards
            add_held_out(self._metrics, self._rollout.name, self._mine, judgements, may_be_graded=graded)
            self._report.first_rewards.compare(self._metrics, self._rollout.name, self._mine, judgements, step)
            self._report.warn_of_grader(self._judge.take_report(), "held-out answers")


def peak_flops(device: torch.device, dtype: torch.dtype) -> float | None:
    """FLOP/s that the device could reach in `dtype`; None where that is not known."""
    if device.type != "cuda" or dtype not in (torch.bfloat16, torch.float16):
        return None
    tflops = PEAK_TFLOPS.get(torch.cuda.get_device_name(device))
    return None if tflops is None else 1e12 * tflops


def num_gpus(place: Place) -> int:
    """Different GPUs that the job has. Collective over the job."""
    return len(set(place.gather_job(device_identity(place.device).encode())))


class Rates(Observer):
    """Adds FLOPs utilisation and answer tokens per GPU second of every step, on the leader of a cell.

    `peak` is the FLOP/s of one device, `gpus` the number of GPUs of the job.
    """

    def __init__(self, spec: AgentConfig, place: Place, peak: float, gpus: int, *, share_prompts: bool) -> None:
        self._architecture = architecture_of(spec)
        self._lora = spec.adapters(self._architecture)
        self._name, self._share_prompts, self._gpus = spec.name, share_prompts, gpus
        self._is_leader, self._is_first = place.is_leader, place.coordinate.global_rank == 0
        self._peak_of_cell = peak * place.rank_map.agents[place.agent].training
        self._step_began = self._update_began = time.perf_counter()

    def joins(self, rollout: RolloutClient, metrics: Metrics) -> None:
        """Notes the metrics to write to."""
        self._metrics = metrics

    def before_training(self, step: int) -> None:
        """Starts the clock of the first step."""
        self._step_began = time.perf_counter()

    def before_update(self, step: int, m: int, update: Sequence[Sample]) -> None:
        """Starts the clock of the update; listed behind the observers that compute something before it."""
        self._update_began = time.perf_counter()

    def after_update(self, step: int, m: int, update: Sequence[Sample], stats: UpdateStats) -> None:
        """Adds the update to the agent's and the job's model FLOPs utilisation."""
        if self._is_leader:
            seconds = time.perf_counter() - self._update_began
            for name in (f"agent/{self._name}", "rate"):
                self._metrics.add(f"{name}/learn_mfu", self._flops(update), seconds * self._peak_of_cell)

    def before_writing(self, step: int, result: StepResult) -> None:
        """Adds the tokens of the cell's answers, and once in the job the seconds of all GPUs."""
        now = time.perf_counter()
        seconds, self._step_began = now - self._step_began, now
        if self._is_leader:
            tokens = sum(len(trajectory.rollout.token_ids) for trajectory in result.trajectories)
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


class Reports(Observer):
    """Writes report.html on rank 0 in a separate process, every n-th step and at the end.

    A step's report is about the steps before it. A failed report stops nothing.
    """

    def __init__(self, config: Config, place: Place) -> None:
        self._run_dir, self._last, self._place = config.run_dir, config.num_steps, place
        self._every, self._is_first = config.logging.report, place.coordinate.global_rank == 0
        self._poll_s = min(REPORT_POLL_S, config.wait_s / 4)
        self._process: subprocess.Popen | None = None
        self._is_last = False

    def before_writing(self, step: int, result: StepResult) -> None:
        """Begins a report if the one before is done; not at the last step, which `finish` reports."""
        is_due = self._is_first and isinstance(self._every, int) and step % self._every == 0 and step < self._last
        if is_due and (self._process is None or self._process.poll() is not None):
            with suppress(OSError):  # no memory for a process
                self._process = self._begin(subprocess.DEVNULL)

    def finish(self) -> str:
        """Writes the report of the whole run while the other ranks wait; a line about it. Collective over the job.

        A launcher may kill a rank that outlives the others for long, and a collective times out. So rank 0 tells the
        others repeatedly that it still writes. A signal to end skips the report.
        """
        while not self._place.agreed_signal():
            line = self._poll().encode() if self._is_first else None
            if line := self._place.share_in_job(line):
                return line.decode()
        if self._process is not None:
            self._process.kill()
        command = f"hacpo-mega report {shlex.quote(str(self._run_dir))}"
        return f"no report: told to end before it was written; {command} writes it"

    def _poll(self) -> str:
        """Waits `_poll_s` for the last report, which begins once an earlier one has ended; "", or the line about it."""
        try:
            if self._process is None:
                self._process, self._is_last = self._begin(subprocess.PIPE), True
            _, stderr = self._process.communicate(timeout=self._poll_s)
        except subprocess.TimeoutExpired:
            return ""
        except OSError as error:
            return f"no report: {error}"
        status, is_last, self._process = self._process.returncode, self._is_last, None
        if not is_last:
            return ""
        if status == 0:
            return f"the report: {self._run_dir / 'report.html'}"
        reason = stderr.strip().rpartition("\n")[2] or f"its process has ended with status {status}"
        return f"no report: {reason}"

    def _begin(self, stderr: int) -> subprocess.Popen:
        command = [sys.executable, "-P", "-m", "hacpo_mega.report", str(self._run_dir)]
        return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=stderr, text=True, errors="replace")


COLUMNS = ("prompt", "gold", "agent", "answer", "reward", "verdict", "num_tokens")
MAX_CHARS = 2000  # of a text in a tracker's table


class UserMetrics(Observer):
    """logging.metrics: the mean of each function over an agent's answers, as agent/NAME/own/FUNCTION.

    A function is called for every answer of a step with what its parameters name: any of COLUMNS (`reward` is NaN for
    an unjudged one), `step`, `row`, or a field of the row. It returns a number, or None to leave the answer out. A
    failure is reported once, and the number is missing: a metric never stops the training.
    """

    def __init__(self, names: Sequence[str]) -> None:
        """ValueError for a function that cannot be loaded."""
        self._functions = {name.rpartition(":")[2]: named_function(name) for name in names}
        self._reported: set[str] = set()

    def joins(self, rollout: RolloutClient, metrics: Metrics) -> None:
        """Notes the agent and the metrics to write to."""
        self._rollout, self._metrics = rollout, metrics

    def before_writing(self, step: int, result: StepResult) -> None:
        """Adds the numbers of this cell's answers, on its leader."""
        if not self._rollout.place.is_leader:
            return
        prompts = {prompt.index: prompt for prompt in result.pool.prompts}
        for trajectory in result.trajectories:
            prompt = prompts[trajectory.rollout.prompt_index]
            row = json.loads(prompt.row) if prompt.row else {}
            values = row | _columns(prompt, self._rollout.name, trajectory) | {"row": row, "step": step}
            for name, function in self._functions.items():
                self._add(name, function, values)

    def _add(self, name: str, function: Callable, values: Mapping[str, Any]) -> None:
        try:
            parameters = inspect.signature(function).parameters
            wanted = {key: p for key, p in parameters.items() if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)}
            missing = [key for key, p in wanted.items() if key not in values and p.default is p.empty]
            if missing:
                raise ValueError(f"it asks for {missing[0]!r}; known here: {', '.join(values)}")
            value = function(**{key: values[key] for key in wanted if key in values})
            if value is not None and not (isinstance(value, SupportsFloat) and math.isfinite(float(value))):
                raise ValueError(f"it returned {value!r:.80}, which is no finite number")
        except Exception as error:
            if name not in self._reported:
                self._reported.add(name)
                reason = f"{type(error).__name__}: {error}".splitlines()[0]
                warn(f"logging.metrics: {name} failed ({reason}); this is said once, training goes on")
            return
        if value is not None:
            self._metrics.add(f"agent/{self._rollout.name}/own/{name}", float(value), 1)


class TrackedAnswers(Observer):
    """Sends trackers the answers to a step's first prompts, and the rewards and lengths of all, from rank 0."""

    def __init__(self, trackers: Trackers, num_prompts: int, names: Sequence[str]) -> None:
        self._trackers, self._num_prompts, self._names = trackers, num_prompts, tuple(names)

    def before_writing(self, step: int, result: StepResult) -> None:
        """Shows the answers of this rank's lane."""
        rows = _rows(result.pool.part(slice(self._num_prompts)), self._names)
        distributions: dict[str, list[float]] = {}
        for name, answers in zip(self._names, zip(*result.pool.trajectories_PNG)):
            of_agent = [trajectory for group in answers for trajectory in group]
            distributions[f"agent/{name}/rewards"] = [t.reward for t in of_agent if t.is_judged]
            distributions[f"agent/{name}/answer_tokens"] = [float(len(t.rollout.token_ids)) for t in of_agent]
        self._trackers.show(step, COLUMNS, rows, {name: values for name, values in distributions.items() if values})


def _rows(pool: Pool, names: Sequence[str]) -> list[list[Any]]:
    """A row of COLUMNS for every answer; long texts are cut."""
    return [
        [value[:MAX_CHARS] if isinstance(value, str) else value for value in _columns(prompt, name, answer).values()]
        for prompt, by_agent in zip(pool.prompts, pool.trajectories_PNG)
        for name, group in zip(names, by_agent)
        for answer in group
    ]


def _columns(prompt: Prompt, agent: str, answer: Trajectory) -> dict[str, Any]:
    """An answer by the names of COLUMNS."""
    rollout, verdict = answer.rollout, answer.verdict.name.lower()
    values = prompt.text, prompt.gold, agent, rollout.text, answer.reward, verdict, len(rollout.token_ids)
    return dict(zip(COLUMNS, values, strict=True))
