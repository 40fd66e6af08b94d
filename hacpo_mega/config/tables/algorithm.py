"""The [algorithm] table: every choice that the paper (arXiv 2603.02604) and its authors' public code make, by name.

Equation numbers are the paper's. Elsewhere: what the methods are (methods.py) and the equations themselves (the package
`algorithm`).
"""

from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from hacpo_mega.config.tables.methods import MECHANISMS, METHODS, MethodName, unread_beside, unread_options
from hacpo_mega.config.tables.section import (
    Count,
    Factor,
    Flag,
    OwnFunction,
    Positive,
    PositiveOrZero,
    Section,
    Share,
    ShareBelowOne,
)

# Options that a preset sets otherwise than the defaults, which are the paper's text.
PRESETS: dict[str, dict[str, Any]] = {
    "paper": {},
    "authors": {
        "cross_baseline": "learner",
        "capability_floor_per_step": True,
        "omega_clip": (0.1, 10.0),
        "baseline_guard": True,
        "aggregation": "mean",
        "log_ratio_clamp": 10.0,
        "eos_in_loss": False,
        "kl_coef": 1e-3,
    },
}


class AlgorithmConfig(Section):
    """HACPO (arXiv 2603.02604), its rivals and its ablations, as options by name."""

    method: MethodName = "hacpo"
    """Learning method: alone (grpo, gspo, gspo_x2), or from all answers. Options it does not read are refused."""
    preset: Literal["paper", "authors"] = "paper"
    """Source of the defaults of this table: the paper's text or its authors' code."""
    advantages: OwnFunction | None = None
    """FILE.py:function or module:function of your own that replaces the method's advantages: from the record Judged of
    hacpo_mega.algorithm to a tensor [P, N, G]."""
    objective: OwnFunction | None = None
    """FILE.py:function or module:function of your own that replaces the method's objective, for own and others'
    answers: from the record PackedAnswers of hacpo_mega.algorithm to the loss of each answer."""

    # Capability (eq. 9) and advantage (eq. 10)
    cross_baseline: Literal["source", "learner"] = "source"
    """Baseline that another agent's answer is measured against: its source's (eq. 10) or its learner's (eq. 50)."""
    capability_metric: Literal["mean_reward", "positive_rate"] = "mean_reward"
    """Average that is an agent's capability P_hat: of rewards, which is also what the authors' code does (it adds up
    those above 0), or of successes (reward.success)."""
    capability_window: Count = 5
    """Steps that P_hat is averaged over (K of eq. 9)."""
    capability_includes_current: Flag = True
    """Let the window of P_hat end with the step that is being trained, instead of the one before it."""
    capability_floor: Annotated[float, Field(strict=True, ge=1e-12, le=1.0)] = 1e-8
    """Lower bound of P_hat, a mean reward; it keeps omega finite for an agent that has earned nothing."""
    capability_floor_per_step: Flag = False
    """Apply the floor also to the mean of every single step, before the window is averaged."""
    omega_clip: tuple[Positive, Positive] | None = None
    """Bounds [low, high] of every capability ratio omega, a factor; not given: omega is unbounded."""
    uniform_group_is_zero: Flag = True
    """Give advantage 0 to answers of a prompt that all earned the same, and nearly 0 if graded rewards are nearly
    equal. Otherwise an omega other than 1 makes an unbounded signal of them."""
    capability_baseline: Flag = True
    """Weigh rewards with omega in the baseline (eq. 10); off: the plain mean of the prompt's answers (Table 2 of the
    paper, without capability-aware advantages)."""
    omega_in_loss: Flag = True
    """Multiply the advantage of another agent's answer by omega (eq. 10); off: Table 3 of the paper, without the
    capability coefficient."""
    baseline_guard: Flag = False
    """Replace a baseline above 1, which no reward can reach, by the agent's own mean on that prompt."""
    advantage_eps: PositiveOrZero = 1e-6
    """Added to the standard deviation of a prompt's rewards before the advantage is divided by it."""

    # Objective (eq. 47 own, eq. 50 cross)
    aggregation: Literal["sum", "mean"] = "sum"
    """Sum of own and cross losses: each divided by the answers per agent (`sum`), or both by all answers (`mean`)."""
    eps_low: ShareBelowOne = 3e-4
    """Own answers: the sequence ratio is clipped from below at 1 - eps_low (eq. 47)."""
    eps_high: PositiveOrZero = 4e-4
    """Own answers: the sequence ratio is clipped from above at 1 + eps_high (eq. 47)."""
    delta: Share = 0.2
    """Others' answers: only ratios from 1 - delta to 1 train in the first update of a step (eq. 50)."""
    delta_step: Share = 0.025
    """Rise of that lower end with every further update of the same step; 0 keeps it where it is."""
    cross_clip: Literal["band", "own", "none"] = "band"
    """Clipping of others' answers: to the band of delta (eq. 50), as own answers (eq. 47), or none (Figure 4 of the
    paper)."""
    alpha: Factor = 1.0
    """Others' answers: exponent of the importance weight ratio^alpha; 0 gives all the same weight."""
    log_ratio_clamp: Annotated[float, Field(strict=True, gt=0.0, le=80.0)] = 20.0
    """Bound of the absolute log of a sequence ratio, in nats: exp overflows 32-bit numbers above 88."""
    ratio_length: Literal["own", "source"] = "own"
    """Token count that divides the learner's log-prob of another agent's answer: its own, or the source's."""
    eos_in_loss: Flag = True
    """Score and train the end-of-sequence token of an answer."""
    kl_coef: Factor = 0.0
    """Weight of the KL divergence to the agent's initial weights, per nat; 0 keeps no copy of them."""
    kl_on: Literal["own", "all"] = "own"
    """Answers in that KL divergence: the learner's own, or everybody's."""

    # The rivals
    ratio_level: Literal["sequence", "token"] = "sequence"
    """Methods sgt and f_tis: one ratio per answer, own answers as gspo; or one per token, as their texts, own answers
    as grpo. f_tis by token needs agents with one tokenizer."""
    transfer_weight: Annotated[float, Field(strict=True, ge=1e-12, le=1000.0)] = 1.0
    """Method sgt: weight of a peer's success (reward.success), relative to the advantage of an own answer."""
    ratio_cap: Positive = 2.0
    """Method f_tis: upper bound of the importance weight of another agent's answer (C of its equation)."""
    divergence_limit: PositiveOrZero = 0.2
    """Method f_tis: others' answers with a negative advantage are left out if the source finds them likelier than the
    learner by more than this, nats per token."""
    answer_divergence_limit: PositiveOrZero = 50.0
    """Method f_tis by token: the same limit as its text has it, in nats per answer (the sum over its tokens)."""
    answer_group: Literal["author", "all"] = "author"
    """Method f_tis: answers that an answer's advantage is measured against: its author's, or everybody's."""

    @model_validator(mode="before")
    @classmethod
    def _fill_from_method_and_preset(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        method, preset = given.get("method", "hacpo"), given.get("preset", "paper")
        if not isinstance(method, str) or not isinstance(preset, str) or method not in METHODS:
            return given
        by_token = METHODS[method].by_token or {} if given.get("ratio_level") == "token" else {}
        chosen = {**PRESETS.get(preset, {}), **METHODS[method].sets, **by_token}
        _refuse_unread(method, given, chosen)
        return {**chosen, **given}

    @model_validator(mode="after")
    def _an_own_objective_is_of_answers(self) -> Self:
        if self.objective is not None and self.method == "grpo":
            raise ValueError(
                "objective replaces that of method 'grpo', whose clip it does not read. Set method = \"gspo\", which "
                "trains on the same answers; the function gets token log-probs from the record PackedAnswers"
            )
        return self

    @model_validator(mode="after")
    def _equal_rewards_have_a_divisor(self) -> Self:
        if self.advantage_eps == 0.0 and not self.uniform_group_is_zero:
            raise ValueError(
                "advantage_eps = 0.0 with uniform_group_is_zero = false: the advantages of a prompt whose answers all "
                "earned the same are divided by 0. Nearest: advantage_eps = 1e-6, or uniform_group_is_zero = true"
            )
        return self

    @model_validator(mode="after")
    def _ordered_bounds(self) -> Self:
        if self.omega_clip and not 0.0 < self.omega_clip[0] <= 1.0 <= self.omega_clip[1]:
            low, high = self.omega_clip
            raise ValueError(
                f"omega_clip {[low, high]}: needs 0 < low <= 1 <= high, since omega of equals is 1. "
                f"Nearest: {[min(low, 1.0), max(high, 1.0)]}"
            )
        return self

    @property
    def shares_answers(self) -> bool:
        """True if a learner trains on the answers of other agents."""
        return METHODS[self.method].cross is not None

    @property
    def uses_capability(self) -> bool:
        """True if omega changes an advantage of the method's."""
        is_on = self.advantages is None and (self.capability_baseline or self.omega_in_loss)
        return METHODS[self.method].reads >= MECHANISMS and is_on

    @property
    def success_readers(self) -> tuple[str, ...]:
        """Parts of the method that need to know which answers are a success (reward.success), by name."""
        if METHODS[self.method].reads_successes:
            return (self.method,)
        reads_capability = self.uses_capability or self.advantages is not None
        if reads_capability and self.capability_metric == "positive_rate":
            return ("capability (positive_rate)",)
        return ()

    @property
    def is_token_level(self) -> bool:
        """True if the ratio is one per token (grpo) instead of one per answer."""
        return self.method == "grpo" or self.ratio_level == "token"

    @property
    def needs_one_tokenizer(self) -> bool:
        """True if others' answers have a ratio per token, which exists where agents have the same tokens."""
        return self.method == "f_tis" and self.ratio_level == "token" and self.objective is None

    @property
    def cross_objective(self) -> str:
        """The objective of others' answers."""
        return "own" if self.cross_clip == "own" else METHODS[self.method].cross or "own"


def _refuse_unread(method: str, given: dict[str, Any], chosen: dict[str, Any]) -> None:
    """ValueError for options that nothing reads, unless they equal their defaults (as in a resolved file).

    An option is unread if `method` does not read it, or if another given option leaves it unread.
    """
    known = AlgorithmConfig.model_fields

    def differs(name: str) -> bool:
        default = chosen.get(name, known[name].default)
        return given[name] != default and not (isinstance(default, tuple) and given[name] == list(default))

    for name in filter(differs, unread_options(method, frozenset(given) & frozenset(known))):
        readers = [other for other, spec in METHODS.items() if name in spec.reads]
        raise ValueError(
            f"{name} = {given[name]!r}: method {method!r} does not read it. Leave it out, or choose a method that "
            f"does: {', '.join(readers)}"
        )
    effective = {"ratio_level": "sequence", "kl_coef": chosen.get("kl_coef", 0.0), **given}
    for name, other in unread_beside(effective).items():
        if name in given and differs(name):
            raise ValueError(f"{name} = {given[name]!r}: not read beside {other} = {effective[other]!r}. Leave one out")
