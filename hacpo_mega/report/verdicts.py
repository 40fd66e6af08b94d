"""A verdict beside every chart of collaboration: a sentence on whether a learner learns from a source, with a level.

A verdict reads the last WINDOW steps that have its number, so that it is about the present. Levels: good, warn, bad,
and none where the numbers do not decide yet.
"""

import math
from collections.abc import Iterator, Mapping
from statistics import fmean, median
from typing import Any

from hacpo_mega.logbook.steps.sharing import Fates
from hacpo_mega.report.run import Run, accuracies, measure_of, phase_series

WINDOW = 50  # steps
SHARE_GOOD, FAR_RATIO = 0.2, 4.0  # share of a source's answers that is enough; ratio (or 1 / ratio) that is too far
OMEGA = (0.1, 10.0)  # within which the paper's capability ratios are usual
GAP_WARN = 0.05  # nats per token, above which a gap is more than bf16's rounding
CUT_WARN = 0.1  # share of answers cut at the limit
WAIT_WARN = 0.2  # of a step
COSINE_FLAT = 0.05
WORST = ("bad", "warn", "good", "none")  # first: a box of many shows its beginning

Verdicts = Iterator[dict[str, Any]]


def verdicts(run: Run) -> list[dict[str, Any]]:
    """Verdicts of a run as {chart, level, text}, worst first; of an agent with `learner`, of a pair with `source`."""
    every: list[dict[str, Any]] = []
    for learner, source in run.pairs:
        pair = {"learner": learner, "source": source}
        every += [verdict | pair for verdict in _pair_verdicts(run, learner, source)]
    for agent in run.agents:
        every += [verdict | {"learner": agent} for verdict in _agent_verdicts(run, agent)]
    return sorted([*every, *_waiting_verdicts(run)], key=lambda verdict: WORST.index(verdict["level"]))


def fates_by_step(run: Run) -> list[dict[str, Any]]:
    """For every pair, the fates of the source's answers over the steps, as {learner, source, steps, series}."""
    tables = []
    for learner, source in run.pairs:
        fates = run.fates(learner, source)
        reasons = sorted({reason for of_step in fates.values() for reason in of_step.lost})
        series = {"reached": [of_step.reached for of_step in fates.values()]}
        series |= {reason: [of_step.lost.get(reason, 0) for of_step in fates.values()] for reason in reasons}
        if fates:
            tables.append({"learner": learner, "source": source, "steps": list(fates), "series": series})
    return tables


def _verdict(chart: str, level: str, text: str) -> dict[str, Any]:
    return {"chart": chart, "level": level, "text": text}


def _recent(run: Run, name: str) -> list[float]:
    return [value for value in run.series(name).values[-WINDOW:] if math.isfinite(value)]


def _pair_verdicts(run: Run, learner: str, source: str) -> Verdicts:
    prefix = f"agent/{learner}/from/{source}"
    cosines = _recent(run, f"{prefix}/grad_cosine")
    fates = Fates.total(list(run.fates(learner, source).values())[-WINDOW:])
    if fates.share is not None:
        yield _sharing_verdict(learner, source, fates, cosines)
    if ratios := _recent(run, f"{prefix}/ratio_mean"):
        ratio = median(ratios)
        is_far = not 1 / FAR_RATIO <= ratio <= FAR_RATIO
        distance = "far from its policy" if is_far else "near its policy"
        text = f"{source}'s answers have a ratio of {ratio:.2f} under {learner}: {distance}"
        yield _verdict("ratio", "warn" if is_far else "good", text)
    if inside := _recent(run, f"{prefix}/inside"):
        share = fmean(inside)
        advice = "" if share >= SHARE_GOOD else ": a wider algorithm.delta would let more of them in"
        text = f"{share:.0%} of {source}'s answers lie inside {learner}'s band{advice}"
        yield _verdict("bands", "good" if share >= SHARE_GOOD else "warn", text)
    if shares := _recent(run, f"{prefix}/grad_share"):
        overrules = fmean(shares) > 0.9 and cosines and fmean(cosines) < 0.0
        text = f"{source}'s answers are {fmean(shares):.0%} of {learner}'s gradient"
        yield _verdict("share", "bad" if overrules else "good", f"{text} and overrule its own" if overrules else text)
    if cosines:
        direction, level = _direction(fmean(cosines))
        yield _verdict("cosine", level, f"{source}'s answers pull {learner} {direction} (cosine {fmean(cosines):+.2f})")
    if omegas := _recent(run, f"omega/{learner}/{source}"):
        is_usual = OMEGA[0] <= omegas[-1] <= OMEGA[1]
        text = f"{learner} is {omegas[-1]:.2f} times as capable as {source}"
        advice = "" if is_usual else ": set algorithm.omega_clip"
        yield _verdict("omega", "good" if is_usual else "warn", text + advice)


def _sharing_verdict(learner: str, source: str, fates: Fates, cosines: list[float]) -> dict[str, Any]:
    share = f"{fates.share:.0%} of its {fates.usable:,} usable answers trained on"
    if fates.is_lost:
        reasons = f": most are {fates}" if fates.reasons else ""
        return _verdict("fates", "bad", f"{learner} learns next to nothing from {source}: {share}{reasons}")
    direction, level = _direction(fmean(cosines)) if cosines else ("", "good")
    level = "warn" if fates.share < SHARE_GOOD or level == "warn" else "good"
    pull = f", pull {direction}" if direction else ""
    return _verdict("fates", level, f"{learner} learns from {source}: {share}{pull}")


def _direction(cosine: float) -> tuple[str, str]:
    """The direction of a source's gradient in words, and the level of a verdict about it."""
    if abs(cosine) < COSINE_FLAT:
        return "across its own direction", "good"
    return ("in the same direction", "good") if cosine > 0 else ("against its own direction", "warn")


def _agent_verdicts(run: Run, agent: str) -> Verdicts:
    evaluated = accuracies(run, agent)
    if len(evaluated) > 1:
        first, last = evaluated[0], evaluated[-1]
        interval, gain = first.gain_interval(last), last.value - first.value
        is_sure = interval is not None and (interval[0] > 0.0 or interval[1] < 0.0)
        level = "none" if not is_sure else "good" if gain > 0.0 else "bad"
        doubt = "" if is_sure else ", which may be chance"
        measure = measure_of(evaluated)
        text = f"{agent}'s {measure} went from {first.value:.3f} to {last.value:.3f}{doubt}"
        yield _verdict(measure.replace(" ", "_"), level, text)
    if gaps := _recent(run, f"agent/{agent}/engine_gap_mean"):
        is_wide = median(map(abs, gaps)) > GAP_WARN
        text = f"engine and trainer of {agent} differ by {median(gaps):.2g} nats a token"
        yield _verdict("engine_gap", "warn" if is_wide else "good", text)
    if cut := _recent(run, f"agent/{agent}/truncated"):
        text = f"{fmean(cut):.0%} of {agent}'s answers are cut at the limit"
        yield _verdict("length", "warn" if fmean(cut) > CUT_WARN else "good", text)
    held = _recent(run, f"agent/{agent}/device_bytes")
    if peaks := held or _recent(run, f"agent/{agent}/rss_bytes"):
        where = "on its fullest device" if held else "in the memory of its largest process"
        yield _verdict("memory", "none", f"{agent} holds {max(peaks) / 2**30:.1f} GiB at most {where}")


def _waited_seconds(run: Run, agent: str) -> list[float]:
    """Seconds that an agent's ranks waited for others, mean over the ranks, for each of the last steps."""
    phases = [seconds for phase, seconds in phase_series(run, agent, "wait").items() if phase != "load"]
    steps = sorted({step for seconds in phases for step in seconds})[-WINDOW:]
    return [sum(seconds.get(step, 0.0) for seconds in phases) for step in steps]


def _waiting_verdicts(run: Run) -> Verdicts:
    """At most one: the agent that waits longest, and for which. All phases count: agents wait in exchanges, too."""
    waits: Mapping[str, float] = {agent: fmean(s) for agent in run.agents if (s := _waited_seconds(run, agent))}
    steps = [value for agent in run.agents for value in _recent(run, f"agent/{agent}/step_s")]
    if len(waits) < 2 or not steps or (step_s := fmean(steps)) <= 0.0:
        return
    slow, quick = min(waits, key=waits.__getitem__), max(waits, key=waits.__getitem__)
    share = (waits[quick] - waits[slow]) / step_s
    if share >= WAIT_WARN:
        yield _verdict("phases", "warn", f"{quick} waits {share:.0%} of a step for {slow}")
    else:
        yield _verdict("phases", "good", "no agent waits long for another")
