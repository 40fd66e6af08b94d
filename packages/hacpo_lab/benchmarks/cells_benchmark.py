"""The gain of dealing an update's answers to cells by their work: `python cells_benchmark.py [FOLDER] [STEPS]`.

One agent of 10 million random parameters under gspo, in two and in four cells of one thread each. A random model ends
an answer anywhere, so lengths have a long tail. Each line has the median over updates, after the first
step's, of what an update takes, of the processor seconds of the fullest cell over the mean's, and of the share in which
a cell is idle; this one only where every cell has a core of its own. And the highest abs(1 - ratio) of a first update.
The model is written to FOLDER (build/cells) when it is not there.
"""

import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
from apart_benchmark import config_of, play_command, run_ranks

from hacpo_mega.agent import agent
from hacpo_mega.logbook.files.metrics import read_metrics
from hacpo_mega.megatron.actor import Actor

UPDATES = 2  # of a step
TRAINING = {"prompts_per_step": 8 * UPDATES, "prompts_per_update": 8, "max_tokens_per_microbatch": 1024}
CELLS, ROUNDS = (2, 4), 2

Updates = list[tuple[float, float]]  # wall and processor seconds of each


def train(is_dealt: bool, *arguments: str) -> Updates:
    """`hacpo-mega train ARGUMENTS` on this rank, without the deal if asked."""
    updates: Updates = []
    learn = Actor.learn

    def timed(*given: Any, **options: Any) -> Any:
        wall, processor = time.perf_counter(), time.process_time()
        found = learn(*given, **options)
        updates.append((time.perf_counter() - wall, time.process_time() - processor))
        return found

    deal = agent.deal_answers if is_dealt else by_prompt
    with mock.patch.object(Actor, "learn", timed), mock.patch.object(agent, "deal_answers", deal):
        play_command("train", *arguments)
    return updates


def by_prompt(tokens_PNG: np.ndarray, *_: Any, cells: int, **__: Any) -> np.ndarray:
    """Every cells-th prompt with all its answers, whatever they cost."""
    return np.broadcast_to((np.arange(len(tokens_PNG)) % cells)[:, None, None], tokens_PNG.shape).copy()


def main(folder: Path, num_steps: int) -> None:
    """Prints a line for each number of cells, without the deal and with it."""
    config = config_of(folder, "10M", {"max_answer_tokens": 240}, TRAINING, 1 + num_steps)
    for cells in CELLS:
        found: dict[bool, list[np.ndarray]] = {False: [], True: []}
        errors = {False: 0.0, True: 0.0}
        for _ in range(ROUNDS):
            for is_dealt, by_rank in found.items():
                run_dir = folder / f"cells_{cells}"
                given = (str(config), f"run_dir={run_dir}", "--fresh", f"agents.one.cells_per_lane={cells}")
                ranks = run_ranks(cells, train, is_dealt, *given)
                by_rank.append(np.array(ranks)[:, UPDATES:])  # [cells, updates, 2]
                steps = read_metrics(run_dir / "metrics.jsonl").values()
                ratios = [step.values.get("agent/one/self/first_ratio_error", 0.0) for step in steps]
                errors[is_dealt] = max(errors[is_dealt], *ratios)
        for is_dealt, by_rank in found.items():
            wall_CU, processor_CU = np.concatenate(by_rank, axis=1).transpose(2, 0, 1)
            seconds = statistics.median(wall_CU.max(axis=0))
            fullest = statistics.median(processor_CU.max(axis=0) / processor_CU.mean(axis=0))
            idle = statistics.median(1.0 - processor_CU.mean(axis=0) / wall_CU.max(axis=0))
            alone = f", idle {idle:.1%}" if cells <= len(os.sched_getaffinity(0)) else ""
            head = f"{cells} cells, {'dealt' if is_dealt else 'by prompt':9}"
            ratio = f"first ratios within {errors[is_dealt]:.1e} of 1"
            print(f"{head}  {seconds:.3f} s an update, fullest {fullest:.3f}{alone}; {ratio}", flush=True)


if __name__ == "__main__":
    given = sys.argv[1:]
    main(Path(given[0] if given else "build/cells").resolve(), int(given[1]) if len(given) > 1 else 4)
