"""The charts of a run and their colours, once for the report and for the page of `hacpo-mega watch`.

A chart names its metrics by pattern, in which {a} is an agent and {b} a source or another agent. Elsewhere: how a chart
is drawn (plots.py with matplotlib, watch/page/curves.js with uPlot), and the sentence beside it (verdicts.py).
"""

from dataclasses import dataclass, fields
from typing import Any

from hacpo_mega.logbook.steps.sharing import WORDS
from hacpo_mega.report.run import Run

# Legible on white and on near-black, and distinct for the common kinds of colour blindness.
AGENT_COLOURS = ("#3d7fd9", "#e2762b", "#23a37c", "#b865c9", "#c79a1e", "#d64c61", "#36a9c4", "#8a9099")
BAND_COLOURS = {"below": "#8b95a5", "inside": "#2aa37d", "above": "#e0a030"}
# Fates of others' answers: those that teach, then the reasons of the others; last the answers that teach nobody.
FATE_COLOURS = {
    "reached": "#2aa37d",
    "outside_band": "#e0a030",
    "too_long": "#d64c61",
    "undecodable": "#b865c9",
    "unencodable": "#5f6fc4",
    "changed": "#36a9c4",
    "control_tokens": "#8d6e63",
    "no_thinking": "#8fb04e",
    "not_finite": "#d17ba3",
    "no_token": "#a3865c",
    "unjudged": "#70757f",
    "zero_advantage": "#b9bfc8",
}
FATE_NAMES = {"reached": "teaches"} | WORDS
# In the order of a step.
PHASE_COLOURS = {
    "roll_out": "#4f86c6",
    "judge": "#c9a33a",
    "score": "#8fb8de",
    "exchange": "#9a9fa8",
    "diagnose": "#7a68b8",
    "learn": "#d9713c",
    "publish": "#5fae8b",
    "evaluate": "#b07cc6",
    "write": "#a98467",
    "checkpoint": "#c26a77",
    "load": "#3e8e9c",
    "export": "#8d6e63",
    "wait": "#c9cdd4",
    "other": "#5b616b",
}
UNKNOWN_PHASE = "#b0705f"


@dataclass(frozen=True)
class ChartSpec:
    """A chart of curves, of a pair's stack of `parts`, or of an agent's stack of `phases`.

    id        name of its PNG file, by which verdicts refer to it
    patterns  of curves; the report's small panels leave out those with {b}
    parts     last parts of the names agent/{a}/from/{b}/<part>, all of which a pair must have
    phases    kind of agent/{a}/<kind>/<phase>_s
    share     the axis is from 0 to 1     level   a line to compare with     log   the page's axis
    """

    id: str
    title: str
    patterns: tuple[str, ...] = ()
    note: str = ""
    unit: str = ""
    parts: tuple[str, ...] = ()
    phases: str = ""
    share: bool = False
    level: float | None = None
    log: bool = False


@dataclass(frozen=True)
class ChartSection:
    """Charts under one heading. `id` names the PNG file of its small charts."""

    id: str
    title: str
    charts: tuple[ChartSpec, ...]


PAIR = "agent/{a}/from/{b}"
SECTIONS = (
    ChartSection("learning", "Learning", (
        ChartSpec("accuracy", "Held-out accuracy", ("agent/{a}/accuracy",),
                  "Greedy answers to held-out prompts, with 95 % intervals."),
        ChartSpec("mean_reward", "Held-out mean reward", ("agent/{a}/eval/reward_mean",),
                  "Greedy answers to held-out prompts, with 95 % intervals."),
        ChartSpec("reward", "Reward while training", ("agent/{a}/reward_mean",),
                  "Mean over the answers an agent sampled in a step."),
    )),
    ChartSection("others", "Learning from each other", (
        ChartSpec("capability", "Capability", ("capability/{a}",), "Mean reward over the last steps."),
        ChartSpec("omega", "Capability ratio", ("omega/{a}/{b}",),
                  "Learner over source; above 1 the learner did better in the last steps.", level=1.0),
        ChartSpec("fates", "Fates of others' answers", parts=("view/num_answers", "view/num_trained"),
                  note="Each answer of a source once: it teaches the learner, or why not. "
                       "Where its advantage is 0 it teaches nobody."),
        ChartSpec("bands", "Others' answers and the band", parts=tuple(BAND_COLOURS), share=True,
                  note="Only answers inside the band give a gradient."),
        ChartSpec("ratio", "Cross ratio", (f"{PAIR}/ratio_mean",),
                  "Learner over source, mean over answers.", level=1.0),
        ChartSpec("ess", "Effective sample size of the weights", (f"{PAIR}/weight_ess",),
                  "100 % when all of others' answers weigh the same.", share=True),
        ChartSpec("signs", "Pull towards right answers", (f"{PAIR}/positive_share",),
                  "Share of others' answers' pull that makes answers likelier.", share=True, level=0.5),
        ChartSpec("share", "Share of the gradient", (f"{PAIR}/grad_share",), share=True),
        ChartSpec("cosine", "Cosine of own and cross gradient", (f"{PAIR}/grad_cosine",),
                  "Over the whole model, each before an update; below 0 a source pulls against the learner's own "
                  "answers.", level=0.0),
    )),
    ChartSection("health", "Health", (
        ChartSpec("grad_norm", "Gradient norm",
                  ("agent/{a}/grad_norm", f"{PAIR}/grad_norm", "agent/{a}/self/grad_norm"), "Before clipping."),
        ChartSpec("lr", "Learning rate", ("agent/{a}/lr",)),
        ChartSpec("logprob", "Log-prob of own answers", ("agent/{a}/logprob_mean",),
                  "Mean of their tokens; its negative estimates the entropy.", "nats a token"),
        ChartSpec("length", "Tokens an answer", ("agent/{a}/answer_tokens_mean",)),
        ChartSpec("truncated", "Answers cut at the limit", ("agent/{a}/truncated",), share=True),
        ChartSpec("clipped", "Own answers clipped", ("agent/{a}/self/clipped",), share=True),
        ChartSpec("own_signs", "Own pull towards right answers", ("agent/{a}/self/positive_share",), share=True),
        ChartSpec("coefficients", "Others' share of the squared loss coefficients",
                  ("agent/{a}/cross_coefficient_share",), share=True),
        ChartSpec("kl", "KL to the initial policy", ("agent/{a}/kl",), unit="nats"),
        ChartSpec("engine_gap", "Engine gap", ("agent/{a}/engine_gap_mean",), "Engine against trainer; a jump warns.",
                  "nats a token", log=True),
        ChartSpec("first_ratio", "Error of the first ratio", ("agent/{a}/self/first_ratio_error",)),
    )),
    ChartSection("time", "Time and memory", (
        ChartSpec("phases", "Seconds of a step by phase", phases="phase_mean", unit="s",
                  note="Mean over an agent's ranks, without loading; exchange includes waiting for others."),
        ChartSpec("wait", "Waiting for others, by phase", phases="wait", unit="s",
                  note="The agent that all wait for waits least."),
        ChartSpec("rate", "Answer tokens a second and GPU", ("rate/answer_tokens_per_gpu_s",)),
        ChartSpec("mfu", "MFU of learning", ("rate/learn_mfu", "agent/{a}/learn_mfu")),
        ChartSpec("step_s", "Seconds a step", ("agent/{a}/step_s",), unit="s"),
        ChartSpec("memory", "Memory", ("agent/{a}/device_bytes", "agent/{a}/rss_bytes"),
                  "Peak of the fullest device, and the largest process.", "bytes"),
        ChartSpec("memory_by_phase", "Memory after answering and learning",
                  ("agent/{a}/memory/roll_out_bytes", "agent/{a}/memory/learn_bytes"),
                  "Held on the fullest device, on the CPU by the largest process, as the phase ends.", "bytes"),
        ChartSpec("asleep", "Memory while the engine sleeps", ("agent/{a}/asleep_bytes",), unit="bytes"),
    )),
)  # fmt: skip


def catalogue() -> dict[str, Any]:
    """Charts and colours, ready for JSON; a chart's fields with their default are absent."""
    sections = [{"title": section.title, "charts": [*map(_table, section.charts)]} for section in SECTIONS]
    return {
        "agents": AGENT_COLOURS,
        "band": {side: [side, colour] for side, colour in BAND_COLOURS.items()},
        "fates": {fate: [FATE_NAMES[fate], colour] for fate, colour in FATE_COLOURS.items()},
        "phases": PHASE_COLOURS,
        "unknown": UNKNOWN_PHASE,
        "sections": sections,
    }


def _table(spec: ChartSpec) -> dict[str, Any]:
    return {field.name: value for field in fields(spec) if (value := getattr(spec, field.name)) != field.default}


def agent_colour(run: Run, agent: str) -> str:
    """The colour of an agent, by its place in the configuration."""
    return AGENT_COLOURS[run.agents.index(agent) % len(AGENT_COLOURS)]


def phase_colour(phase: str) -> str:
    """The colour of a phase; UNKNOWN_PHASE for a phase without one."""
    return PHASE_COLOURS.get(phase, UNKNOWN_PHASE)
