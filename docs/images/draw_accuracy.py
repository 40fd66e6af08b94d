"""Draws docs/images/accuracy.png: held-out accuracy of five methods by step, with 95 % intervals, from docs/evidence.

    python docs/images/draw_accuracy.py

Mean of both agents; the shade is the percentile bootstrap of the mean over the six reported seeds, from scipy.
"""

import json
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
from scipy.stats import bootstrap

HERE = Path(__file__).parent
EVIDENCE = HERE.parent / "evidence"
METHODS = {
    "naive": ("naive sharing", "#23a37c"),
    "hacpo_wide": ("HACPO, delta = 0.5", "#3d7fd9"),
    "hacpo_paper": ("HACPO, delta = 0.2 (paper)", "#b865c9"),
    "gspo_x2": ("GSPO alone, twice the answers", "#e2762b"),
    "gspo": ("GSPO alone", "#8a9099"),
}


def curves_of(method: str) -> tuple[list[int], np.ndarray]:
    """The evaluated steps and, one row for each reported seed, the mean accuracy of all agents at them."""
    results = map(json.loads, (EVIDENCE / "runs.jsonl").read_text().splitlines())
    of_method = [r for r in results if (r["regime"], r["method"]) == ("skills", method)]
    reported = [result for result in of_method if result["stage"] == "reported"]
    by_agent = [list(result["curves"]["accuracy"].values()) for result in reported]
    return reported[0]["steps"], np.array(by_agent).mean(axis=1)


def main() -> None:
    """Draws the picture and writes it beside this file."""
    figure, axis = plt.subplots(figsize=(6.4, 3.4), dpi=150)
    for method, (label, colour) in METHODS.items():
        steps, accuracy_ST = curves_of(method)
        found = bootstrap((accuracy_ST,), np.mean, axis=0, n_resamples=10_000, method="percentile", rng=0)
        axis.plot(steps, accuracy_ST.mean(axis=0), color=colour, label=label, linewidth=1.8)
        interval = found.confidence_interval
        axis.fill_between(steps, interval.low, interval.high, color=colour, alpha=0.18, linewidth=0)
    axis.set(xlabel="step", ylabel="held-out accuracy, mean of both agents", xlim=(0, 40))
    axis.grid(alpha=0.25)
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(frameon=False, fontsize=8, loc="upper left")
    figure.tight_layout()
    figure.savefig(HERE / "accuracy.png", metadata={"Software": None})


if __name__ == "__main__":
    main()
