"""One-time warnings on anomalous metrics, and limits that end a run."""

import math
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from itertools import permutations
from statistics import median
from typing import Any

import torch
from torch import Tensor

from hacpo_grading.judge import JudgeReport
from hacpo_mega.algorithm import REWARD_TOLERANCE
from hacpo_mega.cluster.watchdog import RunStopped
from hacpo_mega.config import AlgorithmConfig
from hacpo_mega.logbook.steps.sharing import MIN_SHARE, Fates, fates_of

# The bounds of the authors' code (`omega_clip` of the preset "authors").
OMEGA_LOW, OMEGA_HIGH = 0.1, 10.0

# Nats per token up to which engine and trainer may differ by rounding: float32 differs by 1e-6, bf16 by .01 to .03.
GAP_FLOOR_FP32, GAP_FLOOR = 1e-3, 0.05
GAP_FACTOR = 4.0

UNJUDGED_STEPS = 3
IDLE_STEPS = 3

SHARED_STEPS = 3

MOST_ERRORS = 100  # of a grader that are kept in every checkpoint: with a time or a number in its text each is another

SPIKE_FACTOR = 5.0
SPIKE_HISTORY = 4  # steps
CALM_WINDOW = 16  # steps without a spike that the next one is held against

# The first update makes Adam's moments, the first exchanges make NCCL's buffers: what is held settles in some steps.
RESIDUE_STEPS, RESIDUE_GROWTH = 4, 1 << 30


class OnceAlarm:
    """An alarm that reports a thing once: it keeps the keys of what it reported. `names` are those of the agents."""

    def __init__(self, names: Sequence[str] = ()) -> None:
        self._names = names
        self._reported: set[Any] = set()

    def state_dict(self) -> dict[str, Any]:
        """The keys of what was said, as plain values."""
        return {"told": sorted(self._reported)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores `state_dict()`."""
        self._reported = {tuple(key) if isinstance(key, list) else key for key in state["told"]}

    def _is_new(self, key: Any) -> bool:
        """True the first time that it is asked about `key`."""
        is_new = key not in self._reported
        self._reported.add(key)
        return is_new


class SpikeAlarm:
    """An alarm on one number per agent that says a spike once: the number must come back down before the next one.

    A value is held against the median of the agent's last CALM_WINDOW values that were no spike.
    """

    FLAG = "was_spike"  # its name in a checkpoint

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names
        self._calm = [deque[float](maxlen=CALM_WINDOW) for _ in names]
        self._was_spike = [False] * len(names)

    def state_dict(self) -> dict[str, Any]:
        """Every agent's calm steps, and whether its last one was a spike, as plain values."""
        return {"calm": [list(calm) for calm in self._calm], self.FLAG: list(self._was_spike)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores `state_dict()`."""
        self._calm = [deque(calm, maxlen=CALM_WINDOW) for calm in state["calm"]]
        self._was_spike = list(state[self.FLAG])

    def _is_new_spike(self, n: int, value: float, *, is_spike: bool, is_usual: bool = True) -> bool:
        """Tells whether agent `n`'s spike begins with this value; a value that is none is kept where it `is_usual`."""
        was_spike, self._was_spike[n] = self._was_spike[n], is_spike
        if not is_spike and is_usual:
            self._calm[n].append(value)
        return is_spike and not was_spike


class OmegaAlarm(OnceAlarm):
    """Says once for every ordered pair of agents that its capability ratio omega (eq. 9) has left [0.1, 10].

    An agent without a single reward has P_hat = capability_floor, so the others' omega and with it advantages grow
    without bound: as the paper defines them, and useless to learn from.
    """

    def warnings(self, omega_NN: Tensor) -> Iterator[str]:
        """A line for every pair (k, j) whose omega_NN[k, j] is outside for the first time."""
        outside_NN = (omega_NN < OMEGA_LOW) | (omega_NN > OMEGA_HIGH)
        for k, j in outside_NN.nonzero().tolist():
            if self._is_new((k, j)):
                yield (
                    f"warning: omega({self._names[k]}, {self._names[j]}) is {omega_NN[k, j].item():.3g}, outside "
                    f"[{OMEGA_LOW:g}, {OMEGA_HIGH:g}]: advantages are scaled by it. Set algorithm.omega_clip = "
                    f"[{OMEGA_LOW:g}, {OMEGA_HIGH:g}], or start from agents that both solve some of the prompts"
                )


class JudgeAlarm(OnceAlarm):
    """Says what a grader failed at when it fails for the first time, and again only for another error.

    A grader that always fails would otherwise train nothing, in silence: its answers enter no mean.
    """

    def warnings(self, judged: JudgeReport, what: str) -> Iterator[str]:
        """A line when the first error of a report is a new one; `what` are the answers that it is about."""
        if len(self._reported) >= MOST_ERRORS:
            self._reported.clear()
        if judged.first_error is None or not self._is_new(judged.first_error):
            return
        if judged.num_unjudged:
            number, fate = judged.num_unjudged, "unjudged"
        else:
            number, fate = judged.num_errors, "earn 0: the grader fails on them, not on their gold"
        yield (
            f"warning: {number} of {judged.num_answers} {what} {fate}; the grader's first error: {judged.first_error}"
        )


class UnjudgedLimit:
    """Ends a run whose grader leaves more than the share `most` of a cell's answers unjudged, 3 steps in a row.

    Unjudged answers enter no mean and no group, so such a run pays for answers that train nothing.
    """

    def __init__(self, most: float) -> None:
        self._most = most
        self._num_steps = 0

    def state_dict(self) -> dict[str, Any]:
        """The steps in a row above the limit, as a plain value."""
        return {"num_steps": self._num_steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores `state_dict()`."""
        self._num_steps = state["num_steps"]

    def see(self, judged: JudgeReport) -> None:
        """Counts a step's sampled answers in this cell; RunStopped after the third step in a row above the limit."""
        is_above = judged.num_unjudged > self._most * judged.num_answers
        self._num_steps = self._num_steps + 1 if is_above else 0
        if self._num_steps == UNJUDGED_STEPS:
            error = judged.first_error or "it ran out of time"
            raise RunStopped(
                f"more than {self._most:.0%} of the answers (reward.max_unjudged_share) were left unjudged in "
                f"{UNJUDGED_STEPS} steps in a row; the grader's first error: {error}"
            )


class EngineAlarm(SpikeAlarm):
    """Says that the engine has begun to answer with another policy than the one that is trained, once for every jump.

    A mean gap of a step (metric engine_gap_mean) has jumped when it exceeds both a floor, which rounding in the agent's
    dtype does not reach, and 4 times its median over the agent's last 16 steps without a jump; before the first such
    step the floor alone decides. It must come back down before the next jump is said. The known failure is an engine
    that wakes with old weights: from .015 to .201 in bf16 (TRL issue 5312).
    """

    FLAG = "jumped"

    def __init__(self, names: Sequence[str], dtypes: Sequence[torch.dtype]) -> None:
        """`dtypes` are those of the agents' parameters."""
        super().__init__(names)
        self._floors = [GAP_FLOOR_FP32 if dtype == torch.float32 else GAP_FLOOR for dtype in dtypes]

    def warnings(self, gap_N: Sequence[float | None]) -> Iterator[str]:
        """A line for every agent whose gap has jumped in this step; `gap_N` in nats per token, None where not known."""
        for n, gap in enumerate(gap_N):
            if gap is None:
                continue
            calm, floor = self._calm[n], self._floors[n]
            limit = max(floor, GAP_FACTOR * median(calm)) if calm else floor
            if self._is_new_spike(n, gap, is_spike=not gap <= limit):  # NaN is a jump too
                before = f"after {median(calm):.3g}, the median of {len(calm)} steps" if calm else "from the first step"
                yield (
                    f"warning: engine and trainer of {self._names[n]} differ by {gap:.3g} nats per token, {before}; "
                    f"allowed are {limit:.3g}. The engine samples from another policy than the one that is trained: "
                    "look at the weights it has after sleep and publish, and at [agents.vllm] (quantization, kernels)"
                )


class GradNormAlarm(SpikeAlarm):
    """Says that an agent's gradient has leapt or broken, once for every spike.

    The largest norm of a step's updates, before clipping (metric grad_norm_max), is a spike when it exceeds 5 times its
    median over the agent's last 16 steps without one, of which there must be 4; a norm that is not finite always is. It
    must come back down before the next spike is said. optimizer.clip_grad bounds the effect of a spike on the
    weights.
    """

    def warnings(self, norm_N: Sequence[float | None]) -> Iterator[str]:
        """A line for every agent whose norm begins to spike in this step; None where there was no update."""
        for n, norm in enumerate(norm_N):
            if norm is None:
                continue
            calm = self._calm[n]
            usual = median(calm) if len(calm) >= SPIKE_HISTORY else math.inf
            is_spike = not (math.isfinite(norm) and norm <= SPIKE_FACTOR * usual)
            # A step that trained nothing says nothing of what is usual.
            if not self._is_new_spike(n, norm, is_spike=is_spike, is_usual=norm > 0.0):
                continue
            name = self._names[n]
            if math.isfinite(norm):
                yield (
                    f"warning: the gradient norm of {name} is {norm:.3g}, {norm / usual:.3g} times the median of "
                    f"{len(calm)} steps. If its reward falls from here on, lower agents.{name}.optimizer.lr"
                )
            else:
                yield f"warning: the gradient norm of {name} is {norm:g}: such updates are skipped and change no weight"


class AdvantageAlarm(OnceAlarm):
    """Says once for every agent that it trained with an advantage beyond what rewards of 0 and 1 can make of it.

    With n answers to a prompt and the highest capability ratio w, that is at most (1 + w) sqrt(n), times w for another
    agent's answer (algorithm/advantage.py), and times the weight of an engine correction. The product's own advantages
    stay below it for graded rewards, too; a function of the user's and the paper's formula without its guard need not.
    """

    def __init__(
        self, names: Sequence[str], algorithm: AlgorithmConfig, num_answers: int, highest_weight: float = 1.0
    ) -> None:
        """`num_answers` of an agent to a prompt, `highest_weight` of an engine correction."""
        super().__init__(names)
        self._algorithm, self._weight = algorithm, highest_weight
        self._root = math.sqrt(num_answers * (len(names) if algorithm.shares_answers else 1))

    def warnings(self, largest_N: Sequence[float | None], highest_omega: float) -> Iterator[str]:
        """A line for every agent whose largest advantage of a step exceeds the limit for the first time."""
        limit = self._weight * highest_omega * (1.0 + highest_omega) * self._root
        if self._algorithm.method == "sgt":
            limit = max(limit, self._algorithm.transfer_weight)
        for n, largest in enumerate(largest_N):
            if largest is None or largest <= limit or not self._is_new(n):
                continue
            if self._algorithm.advantages is not None:
                cause = f"algorithm.advantages = {self._algorithm.advantages!r} returned it"
            else:
                cause = "rewards that are nearly equal make it: set algorithm.uniform_group_is_zero = true"
            yield (
                f"warning: {self._names[n]} trains with an advantage of {largest:.3g}, and rewards of 0 and 1 would "
                f"make at most {limit:.3g}, so that a few answers decide the update; {cause}"
            )


class IdleAlarm:
    """Says once that the first steps of a start teach nothing: nobody earns anything, or no answer is trained on.

    A prompt teaches where its answers earn differently: with equal rewards every advantage is 0 (GRPO).
    """

    def __init__(self, answers_compared: int = 2, own_advantages: str | None = None) -> None:
        """`answers_compared` are the answers to a prompt that one is measured against; `own_advantages` is the function
        of the user's that gives the advantages, if one does."""
        self._num_steps = 0  # of this start; its state is not kept
        self._answers_compared, self._own_advantages = answers_compared, own_advantages

    def warnings(self, rewards: Sequence[float | None], num_trained: Sequence[float | None]) -> Iterator[str]:
        """After IDLE_STEPS steps in a row without a reward, or without a trained answer, of every agent."""
        earned = any(reward is not None and reward > REWARD_TOLERANCE for reward in rewards)
        trained = any(num_trained)
        if self._num_steps >= IDLE_STEPS or (earned and trained):
            self._num_steps = IDLE_STEPS  # it is about the beginning
            return
        self._num_steps += 1
        if self._num_steps == IDLE_STEPS:
            yield f"warning: {self._reason(rewards, earned)}"

    def _reason(self, rewards: Sequence[float | None], earned: bool) -> str:
        steps = f"in {IDLE_STEPS} steps, so nothing is learnt"
        if all(reward is None for reward in rewards):
            return f"no answer of any agent was judged {steps}: what the grader fails at is said above"
        if not earned:
            return (
                f"no answer of any agent earned anything {steps}. Look at an answer in rollouts/ and at `hacpo-mega "
                "check --data`: does the prompt ask for the form that reward.kind reads, and is "
                "rollout.max_answer_tokens long enough?"
            )
        if self._own_advantages is not None:
            return f"algorithm.advantages: {self._own_advantages} gave every answer the advantage 0 {steps}"
        if self._answers_compared == 1:
            return (
                f"no answer was trained on {steps}: an agent's only answer to a prompt has none to be measured "
                "against. Give more rollout.rollouts_per_prompt"
            )
        return (
            f"all answers to a prompt earned the same {steps}: the prompts are too easy or too hard for every agent, "
            "or the reward tells no answers apart. Give other prompts, or more rollout.rollouts_per_prompt"
        )


REMEDIES = {
    "outside_band": "widen algorithm.delta",
    "too_long": "raise rollout.max_answer_tokens, which holds in {learner}'s tokens, too, or ask for shorter answers",
    "undecodable": "look at {source}'s answers in rollouts/: it samples control tokens, or ids that are no text",
    "unencodable": "{learner}'s tokenizer lacks signs that {source} writes: look at its answers in rollouts/",
    "changed": "set rollout.train_changed_reencodings = true, if the changes are harmless",
    "control_tokens": "look at {source}'s answers in rollouts/: they spell out control tokens of {learner}",
    "no_thinking": "have {source}'s chat template open <think> as {learner}'s does, or neither (chat_template_kwargs)",
    "not_finite": "the weights of {source} are broken: go back to a checkpoint before that",
}


class SharingAlarm(OnceAlarm):
    """Says once for every ordered pair of agents that a source's answers do not teach the learner.

    The warning comes after 3 steps in a row in each of which less than 5 % of the usable answers of all ranks give the
    learner a gradient, as soon as these were 8 answers. Usable are answers that are judged, have an advantage other
    than 0 and a token to train: the others teach nobody, their own agent neither. A step without a usable answer does
    not end such a row.
    """

    def __init__(self, names: Sequence[str]) -> None:
        super().__init__(names)
        self._streaks: dict[tuple[str, str], tuple[int, Fates]] = {}  # steps in a row, and the sum of their answers

    def state_dict(self) -> dict[str, Any]:
        """The pairs that were spoken of, and the rows of the others, as plain values."""
        rows = [[*pair, steps, fates.reached, dict(fates.lost)] for pair, (steps, fates) in self._streaks.items()]
        return super().state_dict() | {"rows": rows}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores `state_dict()`."""
        super().load_state_dict(state)
        self._streaks = {(k, j): (steps, Fates(reached, dict(lost))) for k, j, steps, reached, lost in state["rows"]}

    def warnings(self, values: Mapping[str, float]) -> Iterator[str]:
        """A line for every pair whose row is long enough by now; `values` are the step's reduced metrics."""
        for pair in permutations(self._names, 2):
            if pair in self._reported or (fates := fates_of(values, *pair)) is None:
                continue
            if fates.share is not None and fates.share >= MIN_SHARE:
                self._streaks.pop(pair, None)
                continue
            steps, before = self._streaks.get(pair, (0, Fates(0, {})))
            self._streaks[pair] = steps, whole = steps + 1, Fates.total((before, fates))
            if steps >= SHARED_STEPS and whole.is_lost:
                self._reported.add(pair)
                del self._streaks[pair]
                yield _sharing_warning(*pair, steps, whole)


def _sharing_warning(learner: str, source: str, num_steps: int, fates: Fates) -> str:
    remedy = REMEDIES[fates.reasons[0][0]].format(learner=learner, source=source)
    return (
        f"warning: {fates.reached} of {fates.answers:,} of {source}'s answers reach {learner} in {num_steps} steps: "
        f"{fates}. {learner} learns next to nothing from {source}: {remedy}"
    )


class MemoryLeakAlarm:
    """Says that more and more memory is held while an agent's engine sleeps, once for every GiB of it.

    An engine that does not give all back, or anything else that keeps a little of every step, takes from the actor
    until learning fails. A step's reading (metric asleep_bytes) is held against the highest of the first 4 steps since
    the process started, and after a warning against the one that was warned of.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names
        self._first: list[list[float]] = [[] for _ in names]

    def warnings(self, held_N: Sequence[float | None]) -> Iterator[str]:
        """A line for every agent that holds a GiB more; `held_N` in bytes, None where there was no step."""
        for n, held in enumerate(held_N):
            if held is None:
                continue
            first = self._first[n]
            if len(first) < RESIDUE_STEPS:
                first.append(held)
            elif held > max(first) + RESIDUE_GROWTH:
                yield (
                    f"warning: {held / 2**30:.2f} GiB are held while the engine of {self._names[n]} sleeps, after at "
                    f"most {max(first) / 2**30:.2f} before: learning has that much less (metric asleep_bytes). A "
                    "restart, which goes on from the last checkpoint, frees what has leaked"
                )
                self._first[n] = [held] * RESIDUE_STEPS
