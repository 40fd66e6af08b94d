"""Colours of every figure and page by meaning: agents, phases, the band."""

from hacpo_mega.report.run import Run

# Legible on white and on near-black alike, and apart from each other for the common kinds of colour blindness.
AGENT_COLOURS = ("#3d7fd9", "#e2762b", "#23a37c", "#b865c9", "#c79a1e", "#d64c61", "#36a9c4", "#8a9099")
BAND_COLOURS = {"below": "#8b95a5", "inside": "#2aa37d", "above": "#e0a030"}
# Fates of others' answers: what teaches, then reasons why not; at the end those that would teach nobody.
FATE_COLOURS = {
    "reached": "#2aa37d",
    "outside_band": "#e0a030",
    "too_long": "#d64c61",
    "undecodable": "#b865c9",
    "unencodable": "#5f6fc4",
    "changed": "#36a9c4",
    "control_tokens": "#8d6e63",
    "not_finite": "#d17ba3",
    "unjudged": "#70757f",
    "zero_advantage": "#b9bfc8",
}
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


def agent_colour(run: Run, agent: str) -> str:
    """The colour of an agent, by its place in the configuration."""
    return AGENT_COLOURS[run.agents.index(agent) % len(AGENT_COLOURS)]


def phase_colour(phase: str) -> str:
    """The colour of a phase, one for all that have none of their own."""
    return PHASE_COLOURS.get(phase, UNKNOWN_PHASE)
