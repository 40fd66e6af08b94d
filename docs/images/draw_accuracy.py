"""Draws docs/images/accuracy.png: test accuracy of equal agents, method by method, from docs/evidence_equals.

    python docs/images/draw_accuracy.py

Mean of both agents, greedy, each skill alike; a point is a seed, a bar the mean. At the right, the answers that a run
generated, and those that trained an agent, each counted once for every agent that learned from it.
"""

from pathlib import Path

import matplotlib.pyplot as plt

from hacpo_lab.experiments.evidence import ALL_AGENTS, evidence_of
from hacpo_lab.experiments.grid import load_grid
from hacpo_lab.experiments.result import GREEDY, Result
from hacpo_lab.experiments.trust import read_results

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
METHODS = {
    "value": ("naive, learner's own mean", "#1b7f62"),
    "value_raw": ("the same, undivided", "#1b7f62"),
    "naive": ("naive sharing", "#23a37c"),
    "naive_half": ("naive sharing, half of the answers", "#23a37c"),
    "hacpo_wide": ("HACPO, delta = 0.5", "#3d7fd9"),
    "sgt": ("SGT", "#b8912a"),
    "hacpo_paper": ("HACPO, delta = 0.2 (paper)", "#b865c9"),
    "hacpo_authors": ("HACPO as in the authors' code", "#b865c9"),
    "gspo_x2": ("GSPO alone, twice the answers", "#e2762b"),
    "gspo_4g": ("GSPO alone, four times the answers", "#e2762b"),
}


def accuracy_of(result: Result) -> float:
    """Share of right greedy answers, mean over the skills of an agent, then over agents."""
    of_agents = [result.final.right(GREEDY, agent) for agent in result.agents]
    return float(sum(right.mean() for skills in of_agents for right in skills.values()) / sum(map(len, of_agents)))


def main() -> None:
    """Draws the picture and writes it beside this file."""
    grid = load_grid(ROOT / "configs/evidence_equals.toml")
    results = read_results(grid)[0]
    regime = evidence_of(grid, results)["skills"]
    figure, axis = plt.subplots(figsize=(7.2, 3.6), dpi=150)
    order = sorted(METHODS, key=lambda method: regime.methods[method].accuracy[ALL_AGENTS].mean)
    for row, method in enumerate(order):
        colour, found = METHODS[method][1], regime.methods[method]
        reported = [r for r in results.values() if (r.method, r.stage) == (method, "reported")]
        axis.scatter([accuracy_of(r) for r in reported], [row] * len(reported), color=colour, s=14, alpha=0.55, lw=0)
        axis.plot([found.accuracy[ALL_AGENTS].mean] * 2, [row - 0.32, row + 0.32], color=colour, linewidth=2.4)
        counts = f"{found.generated_answers[-1] / 1000:.0f}k / {found.trained_answers[-1] / 1000:.0f}k"
        axis.text(1.01, row, counts, transform=axis.get_yaxis_transform(), va="center", fontsize=8)
    axis.text(1.01, len(order) - 0.35, "generated / trained", transform=axis.get_yaxis_transform(), fontsize=7)
    axis.set_yticks(range(len(order)), [METHODS[method][0] for method in order], fontsize=8)
    axis.set(xlabel="accuracy on the test set, mean of both agents")
    axis.grid(axis="x", alpha=0.25)
    axis.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(HERE / "accuracy.png", metadata={"Software": None})


if __name__ == "__main__":
    main()
