"""The job of jobs/test_decode_scheduler.py: one process, the same requests by vLLM's scheduler and the project's.

Every step is written down: what the model was given, and after it the blocks that are free, in order, and the prefixes
that are cached. OUT/seen.pt holds it by scheduler, then by case.
"""

from pathlib import Path

import numpy as np
import torch
from job import TIMEOUT_S
from vllm.logprobs import FlatLogprobs
from vllm.v1.engine.logprobs import LogprobsProcessor
from vllm.v1.outputs import LogprobsLists

from hacpo_mega.cluster.place import Place
from hacpo_mega.cluster.rank_map import AgentShape, RankMap
from hacpo_mega.rollout.engine import Engine
from hacpo_mega.rollout.vllm.engine_spec import EngineSpec
from hacpo_mega.rollout.vllm.row_noise import answer_seed

EOS, MAX_MODEL_LEN, NUM_BLOCKS = 7, 256, 80
VLLMS = "vllm.v1.core.sched.scheduler.Scheduler"


def requests(num: int, longest: int) -> tuple[list[list[int]], list[int]]:
    """Prompts of which eight in turn are equal, many longer than a block, and how many tokens an answer shall have."""
    rng = np.random.default_rng(num)
    prompts = [rng.integers(8, 131, rng.integers(1, longest)).tolist() for _ in range(num // 8)]
    return [prompts[n // 8] for n in range(num)], rng.integers(1, 90, num).tolist()


class Watched:
    """An engine whose scheduler's steps are written down."""

    def __init__(self, folder: Path, **options) -> None:
        spec = EngineSpec(
            folder,
            max_model_len=MAX_MODEL_LEN,
            dtype=torch.float32,
            eos_ids=[EOS],
            options=options,
        )
        self.engine = Engine(spec)
        with self.engine._guard.open() as llm:
            self.core = llm.llm_engine.engine_core.engine_core
            self.processor = llm.llm_engine.output_processor
        self.scheduler, self.steps, self.outputs, self.num_to_end = self.core.scheduler, [], [], 0
        self._schedule, self._update = self.scheduler.schedule, self.scheduler.update_from_output
        self.scheduler.schedule, self.scheduler.update_from_output = self.schedule, self.update

    def schedule(self, throttle: bool = False):
        step = self._schedule(throttle)
        cached = step.scheduled_cached_reqs
        self.steps.append(
            {
                "new": [
                    (number(new.req_id), new.block_ids, new.num_computed_tokens, len(new.prompt_token_ids))
                    for new in step.scheduled_new_reqs
                ],
                "cached": list(map(number, cached.req_ids)),
                "resumed": sorted(map(number, cached.resumed_req_ids)),
                "blocks": cached.new_block_ids,
                "computed": cached.num_computed_tokens,
                "outputs": cached.num_output_tokens,
                "tokens": [(number(name), tokens) for name, tokens in step.num_scheduled_tokens.items()],
                "all tokens": sorted((number(name), tokens) for name, tokens in cached.all_token_ids.items()),
                "finished": sorted(map(number, step.finished_req_ids)),
                "preempted": sorted(map(number, step.preempted_req_ids)),
            }
        )
        return step

    def update(self, step, answered):
        if self.num_to_end and len(self.steps) % 5 == 0:
            self.num_to_end -= 1
            ended = self.scheduler.running[len(self.scheduler.running) // 2]
            self.processor.abort_requests([ended.request_id], internal=True)
            self.scheduler.finish_requests(ended.request_id, type(ended.status).FINISHED_ABORTED)
        outputs = self._update(step, answered)
        pool = self.scheduler.kv_cache_manager.block_pool
        self.steps[-1] |= {
            "free": [block.block_id for block in pool.free_block_queue.get_all_free_blocks()],
            "prefixes": sorted((block.block_id, block.block_hash) for block in pool.blocks if block.block_hash),
            "running": [
                (number(r.request_id), r.num_computed_tokens, r.num_tokens, len(r.block_hashes), r.num_in_flight_tokens)
                for r in self.scheduler.running
            ],
        }
        self.outputs.append(sum(len(mine.outputs) for mine in outputs.values()))
        return outputs

    def answers(self, num: int, longest: int, *, of_length: bool, stop_after: int | None = None, **how) -> dict:
        prompts, lengths = requests(num, longest)
        self.steps, self.outputs, told = [], [], []
        with self.engine._guard.open() as llm:
            llm.reset_prefix_cache()
            first = llm.request_counter.counter
        seeds = [answer_seed(1, 0, n // 8, n % 8, 0) for n in range(num)]
        unwanted = {} if stop_after is None else {"is_unwanted": lambda: len(told) >= stop_after}
        answers = self.engine.generate(
            prompts,
            seeds,
            max_tokens=90,
            lengths=lengths if of_length else None,
            on_answer=lambda place, answer: told.append(place),
            **{"return_logprobs": True, **how, **unwanted},
        )
        return {
            "answers": [(a.token_ids, int(a.stop), a.logprobs) for a in answers],
            "told": told,
            "steps": self.steps,
            "first": first,
            "passed on": self.outputs,
        }


def number(request_id: str) -> int:
    """vLLM adds letters to the number of a request that are others every time."""
    return int(request_id.split("-")[0])


def seen_by(models: Path, **options) -> dict:
    """All cases: a cache that preempts, one that makes waves by its slots, one that holds all."""
    small = Watched(models / "qwen3", num_gpu_blocks_override=NUM_BLOCKS, max_num_seqs=64, **options)
    seen = {
        "preempted": small.answers(48, 70, of_length=True),
        "own ends": small.answers(48, 70, of_length=False, temperature=0.7),
        "greedy": small.answers(24, 70, of_length=False, temperature=0.0, return_logprobs=False),
    }
    small.num_to_end = 3
    seen["ended within a step"] = small.answers(24, 70, of_length=True)
    # The last one: vLLM frees what is cut in the order of a set, which is another one every time.
    seen["cut"] = small.answers(48, 70, of_length=True, stop_after=20)
    small.engine.close()
    wide = Watched(models / "qwen3", num_gpu_blocks_override=5 * NUM_BLOCKS, max_num_seqs=12, **options)
    seen["waves"] = wide.answers(40, 120, of_length=True)
    seen["long"] = wide.answers(8, 3, of_length=False, temperature=2.0)
    seen["class"] = type(wide.scheduler).__name__
    wide.engine.close()
    return seen


def written() -> list[tuple]:
    """Log-probs of three, one and five tokens as they are written down: by the project, and by vLLM token by token."""
    rng, records = np.random.default_rng(4), []
    found = [
        LogprobsLists(rng.integers(0, 99, (n, 1)), -rng.random((n, 1), np.float32), rng.integers(1, 9, n))
        for n in (3, 1, 5)
    ]
    for write in (LogprobsProcessor._update_sample_logprobs, LogprobsProcessor._update_sample_logprobs.__wrapped__):
        processor = LogprobsProcessor(None, FlatLogprobs(), None, 0.0, 0, None)
        for lists in found:
            write(processor, lists)
        records.append((vars(processor.logprobs), processor.cumulative_logprob))
    return records


def main(models: Path, out: Path) -> None:
    with Place.join(RankMap(lanes=1, agents=(AgentShape("qwen3"),)), TIMEOUT_S):
        seen = {"vllm": seen_by(models, scheduler_cls=VLLMS), "ours": seen_by(models), "written": written()}
        torch.save(seen, out / "seen.pt")
