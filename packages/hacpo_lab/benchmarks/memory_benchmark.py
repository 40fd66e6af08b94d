"""The budget of the paper's pairs against the real Megatron model on tensors without numbers, layer by layer.

    python memory_benchmark.py [PAIR ...]    Markdown: every model at full size

The head is the CPU's on both sides, since a Triton kernel cannot be traced; attention and norms are CUDA's.
"""

import os
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

sys.path.extend(str(Path(__file__).resolve().parents[3] / "tests" / "support" / folder) for folder in ("", "cases"))

from memory_cases import learn_of_budget, learn_of_trace, paper_plans, traced
from paper_models import make_paper_workplace
from repository import ROOT

from hacpo_mega.memory.actor_bytes import actor_memory
from hacpo_mega.memory.budget import GIB


def main(pairs: list[str]) -> None:
    print("| agent | layout | states | activations | backward | learn, traced | learn, budget | off | seconds |")
    print("|---|---|---|---|---|---|---|---|---|")
    seen = set()
    for pair in pairs:
        for name, plan in paper_plans(pair).items():
            key = (replace(plan.architecture, max_positions=1), plan.layout, plan.dp, plan.recompute)
            if key in seen:
                continue
            seen.add(key)
            start = time.process_time()
            found, budget = traced(plan), actor_memory(plan)
            seconds = time.process_time() - start
            states = found.weights + found.gradients + found.main_weights + found.moments
            sizes = [states, found.saved, found.learn - found.saved, learn_of_trace(found), learn_of_budget(budget)]
            off = 100 * (sizes[4] / sizes[3] - 1)
            layout = f"tp {plan.layout.tp}, dp {plan.dp}, {plan.recompute}"
            cells = [name, layout, *(f"{size / GIB:.3f}" for size in sizes), f"{off:+.2f} %", f"{seconds:.0f}"]
            print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        make_paper_workplace(Path(folder))
        os.chdir(folder)
        main(sys.argv[1:] or sorted(file.stem for file in (ROOT / "configs" / "paper").glob("*.toml")))
