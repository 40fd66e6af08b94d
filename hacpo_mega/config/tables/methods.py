"""The methods of `algorithm.method`: the answers each learns from, the defaults it sets, and the options it reads.

A method is a preset of the one loop, never a second one. `algorithm/` has what differs between them as pure functions.

    grpo      each agent alone: token-level ratio, clip .2 / .28 (DeepSeekMath, arXiv 2402.03300; DAPO, 2503.14476)
    gspo      each agent alone: sequence ratio, clip 3e-4 / 4e-4 (arXiv 2507.18071)
    gspo_x2   gspo with twice the answers to a prompt and half the prompts in an update: as many answers per update
    naive     all answers, one plain group over them, no omega, own clip for everybody's answers
    sgt       own answers as gspo; a peer's verified answers where the learner failed itself (arXiv 2605.07244)
    f_tis     all answers, each judged in its author's group, truncated importance weights (arXiv 2605.22537)
              both have one ratio per answer, or per token as their texts (`ratio_level = "token"`)
    hacpo     all four mechanisms (arXiv 2603.02604)
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

# Options that every method reads.
COMMON = frozenset(
    {"method", "preset", "eps_low", "eps_high", "log_ratio_clamp", "eos_in_loss", "kl_coef", "advantage_eps"}
    | {"uniform_group_is_zero", "aggregation", "advantages", "objective"}
)
# Options of every method that trains on others' answers.
SHARING = frozenset({"ratio_length", "kl_on"})
# Options that define an agent's capability, which functions of the user's get, too.
CAPABILITY = frozenset(
    {"capability_metric", "capability_window", "capability_includes_current", "capability_floor"}
    | {"capability_floor_per_step"}
)
# Options that set HACPO's mechanisms.
MECHANISMS = CAPABILITY | {
    *("cross_baseline", "omega_clip", "baseline_guard", "capability_baseline", "omega_in_loss"),
    *("delta", "delta_step", "alpha", "cross_clip"),
}


@dataclass(frozen=True)
class Method:
    """Configuration of a method, beside its functions.

    sets                options that it sets differently from a preset; options that are given override them
    reads               the options that it reads beside COMMON; any other is refused
    needs_peers         whether it needs more than one agent
    cross               objective of others' answers, a name of hacpo_kernels.Bounds, which refuses others; None where
                        nothing is shared; "band" follows `cross_clip`; "function" is for a method with an objective in
                        algorithm/methods.py
    reads_successes     whether it needs to know which answers are a success (reward.success)
    by_token            options that `ratio_level = "token"` sets differently; None if a method has no such form
    answers, updates    factors of rollout.rollouts_per_prompt and of the updates in a step
    """

    sets: Mapping[str, Any] = field(default_factory=dict)
    reads: frozenset[str] = frozenset()
    needs_peers: bool = False
    cross: str | None = None
    reads_successes: bool = False
    by_token: Mapping[str, Any] | None = None
    answers: int = 1
    updates: int = 1


TOKEN_CLIP = {"eps_low": 0.2, "eps_high": 0.28}
METHODS: Mapping[str, Method] = {
    "grpo": Method(sets=TOKEN_CLIP),
    "gspo": Method(),
    "gspo_x2": Method(answers=2, updates=2),
    "naive": Method(
        # HACPO with its four mechanisms off: that is all that naive sharing is.
        sets={"capability_baseline": False, "omega_in_loss": False, "alpha": 0.0, "cross_clip": "own"},
        reads=SHARING,
        needs_peers=True,
        cross="own",
    ),
    "sgt": Method(reads=SHARING | {"transfer_weight", "ratio_level"}, needs_peers=True, cross="likelihood",
                  reads_successes=True, by_token=TOKEN_CLIP),
    "f_tis": Method(reads=SHARING | {"ratio_cap", "divergence_limit", "answer_divergence_limit", "answer_group",
                                     "ratio_level"}, needs_peers=True, cross="truncated", by_token=TOKEN_CLIP),
    "hacpo": Method(reads=SHARING | MECHANISMS, cross="band"),
}  # fmt: skip
MethodName = Literal[tuple(METHODS)]


# (an option, its value or ... for any, the options that are then unread). The own clip has no exponent, and an exponent
# of 0 has no effect: so `alpha = 0` beside it is accepted.
CLIPS = frozenset({"eps_low", "eps_high", "delta", "delta_step", "alpha", "cross_clip", "ratio_level", "ratio_cap"})
LIMITS = frozenset({"divergence_limit", "answer_divergence_limit"})
UNREAD_BESIDE: tuple[tuple[str, Any, frozenset[str]], ...] = (
    ("cross_clip", "own", frozenset({"alpha", "delta", "delta_step"})),
    ("cross_clip", "none", frozenset({"delta", "delta_step"})),
    ("ratio_level", "token", frozenset({"divergence_limit", "ratio_length"})),
    ("ratio_level", "sequence", frozenset({"answer_divergence_limit"})),
    ("kl_coef", 0.0, frozenset({"kl_on"})),
    ("objective", ..., CLIPS | LIMITS),
    # omega_clip would change a metric alone: the function forms its own omega, from the capability.
    ("advantages", ..., MECHANISMS - CAPABILITY - CLIPS),
    ("advantages", ..., frozenset({"uniform_group_is_zero", "advantage_eps", "transfer_weight", "answer_group"})),
)


def unread_options(method: str, names: Mapping[str, Any] | frozenset[str]) -> list[str]:
    """The options among `names` that a method does not read, in alphabetical order.

    Advantages of the user's, if `names` has them, read the capability.
    """
    by_user = CAPABILITY if "advantages" in names else frozenset()
    return sorted(set(names) - COMMON - METHODS[method].reads - by_user)


def unread_beside(given: Mapping[str, Any]) -> dict[str, str]:
    """The options in `given` that another one of them leaves unread, with that other one."""
    unread = {}
    for key, value, names in UNREAD_BESIDE:
        if given.get(key) is not None and value in (..., given[key]):
            unread |= dict.fromkeys(sorted(names & given.keys()), key)
    if given.get("alpha") == 0.0 and unread.get("alpha") == "cross_clip":
        del unread["alpha"]
    return unread
