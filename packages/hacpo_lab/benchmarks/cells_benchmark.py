"""The gain of dealing an update's answers to cells by their work: `python cells_benchmark.py [FOLDER] [STEPS]`.

One agent of 10 million random parameters under gspo, in two and in four cells of one thread each. A random model ends
an answer with each token alike: lengths have a long tail. Each line has the median over updates, after the first
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

sys.path.extend(str(Path(__file__).resolve().parents[3] / "tests" / "support" / folder) for folder in ("", "cases"))

from job import play_command, run_ranks
from run_cases import CHARACTERS, write_config
from tiny_models import make_model

from hacpo_mega.agent import agent
from hacpo_mega.logbook.files.metrics import read_metrics
from hacpo_mega.megatron.actor import Actor
from hacpo_mega.samples.tokenizers import make_tokenizer

SIZE = {"num_layers": 6, "hidden_size": 384, "num_heads": 12, "num_kv_heads": 4, "head_dim": 32, "ffn_size": 1024}
PROMPTS_PER_UPDATE, UPDATES = 8, 2
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


def config_of(folder: Path, num_steps: int) -> Path:
    """One agent, whose answers have some 80 tokens in the mean and up to 240."""
    if not (folder / "one").exists():
        make_model(folder / "one", "qwen3", vocab_size=len(CHARACTERS) + 2, tied=True, seed=1, **SIZE)
        make_tokenizer(folder / "one", CHARACTERS)
    return write_config(
        folder,
        [{"name": "one", "model": str(folder / "one"), "optimizer": {"lr": 1e-6}}],
        num_steps=num_steps,
        algorithm={"method": "gspo"},
        rollout={"rollouts_per_prompt": 8, "max_prompt_tokens": 8, "max_answer_tokens": 240},
        training={
            "prompts_per_step": UPDATES * PROMPTS_PER_UPDATE,
            "prompts_per_update": PROMPTS_PER_UPDATE,
            "max_tokens_per_microbatch": 1024,
        },
        evaluation={"num_prompts": 8},
        checkpoint={"every_steps": 0},
    )


def main(folder: Path, num_steps: int) -> None:
    """Prints a line for each number of cells, without the deal and with it."""
    config = config_of(folder, 1 + num_steps)
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
