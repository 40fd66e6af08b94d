"""The job of jobs/test_row_noise.py: a million tokens drawn by vLLM's CPU kernel under the project's noise."""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
from vllm.platforms import current_platform

from hacpo_mega.rollout.vllm.row_noise import RowNoise, answer_seed

WEIGHTS = (0.4, 0.25, 0.15, 0.1, 0.05, 0.03, 0.015, 0.005)
ANSWERS, PLACES = 2000, 500


def drawn(logits_RV: torch.Tensor, seeds: list[int], places: list[int], prompts: list[int]):
    """Tokens and log-probs of rows whose answers have so many tokens, behind prompts of so many."""
    batch = SimpleNamespace(
        num_prompt_tokens=np.array(prompts), num_tokens_no_spec=np.array(prompts) + np.array(places)
    )
    generators = {row: torch.Generator().manual_seed(seed) for row, seed in enumerate(seeds)}
    noise = RowNoise(SimpleNamespace(input_batch=batch))
    return noise(logits_RV, generators, None, None)


def draws(seeds: list[int]) -> np.ndarray:
    """Tokens [answer, place] of the distribution above."""
    logits_RV = torch.tensor(WEIGHTS).log().repeat(len(seeds), 1)
    columns = [drawn(logits_RV, seeds, [place] * len(seeds), [5] * len(seeds))[0] for place in range(PLACES)]
    return torch.stack(columns, 1).numpy()


def layouts() -> dict:
    """The same rows together, in another order, and one by one."""
    rows = 40
    logits_RV = torch.randn(rows, 300, generator=torch.Generator().manual_seed(2))
    seeds = [answer_seed(1, 2, row // 8, row % 8, 0) for row in range(rows)]
    places, prompts = [row * 7 % 50 for row in range(rows)], [1 + row % 9 for row in range(rows)]
    together, logprobs_RV = drawn(logits_RV, seeds, places, prompts)
    order = list(range(rows))[::-1]
    backwards, _ = drawn(logits_RV[order], [seeds[r] for r in order], [places[r] for r in order], prompts[::-1])
    alone = [drawn(logits_RV[r : r + 1], [seeds[r]], [places[r]], [prompts[r]])[0].item() for r in range(rows)]
    return {
        "logits": logits_RV,
        "logprobs": logprobs_RV,
        "together": together.tolist(),
        "backwards": backwards.tolist()[::-1],
        "alone": alone,
    }


def main(out: Path) -> None:
    current_platform.import_kernels()
    seen = {
        "answers": draws([answer_seed(3, 5, n // 8, n % 8, 1) for n in range(ANSWERS)]),
        "numbered": draws(list(range(ANSWERS))),
        "layouts": layouts(),
    }
    torch.save(seen, out / "drawn.pt")
