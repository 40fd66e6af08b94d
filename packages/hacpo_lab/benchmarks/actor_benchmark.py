"""Seconds of the actor alone, scoring and learning, with a table of its kernels.

    python actor_benchmark.py MODEL [--sequences 64] [--tokens 1024] [--microbatch 16384] [--kernels 25]

One rank alone. Learning is an update of cross-entropy in which every token but the first has a gradient, Adam's step
included. Medians of all rounds after one of warm-up; FLOPs are those of hacpo_mega/models/flops.py.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path

from hacpo_mega.cluster.machine.environment import prepare_environment

prepare_environment()

import numpy as np  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch.profiler import ProfilerActivity, profile  # noqa: E402

from hacpo_mega.config import OptimizerConfig  # noqa: E402
from hacpo_mega.megatron.actor import Actor, ActorSpec  # noqa: E402
from hacpo_mega.models.flops import forward_flops  # noqa: E402
from hacpo_mega.models.sharding.layout import Layout  # noqa: E402
from hacpo_mega.records import TokenSequence  # noqa: E402


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--sequences", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=1024, help="of every sequence, its prompt of one included")
    parser.add_argument("--microbatch", type=int, default=16_384, help="training.max_tokens_per_microbatch")
    parser.add_argument("--recompute", default="none", choices=("none", "mlp", "full"))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--kernels", type=int, default=0, help="lines of the profile of one more update")
    return parser.parse_args()


def median_s(action: Callable[[], object], rounds: int) -> float:
    """Median seconds of an action, which ends when the device is idle; one more goes before."""
    took = []
    for _ in range(rounds + 1):
        start = time.perf_counter()
        action()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        took.append(time.perf_counter() - start)
    return statistics.median(took[1:])


def main() -> None:
    asked = arguments()
    on_cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if on_cuda else "gloo", store=dist.HashStore(), rank=0, world_size=1)
    actor = Actor(
        asked.model,
        ActorSpec(
            layout=Layout(),
            optimizer=OptimizerConfig(lr=1e-6),
            total_updates=1000,
            max_tokens_per_microbatch=asked.microbatch,
            max_positions=asked.tokens,
            recompute=asked.recompute,
        ),
    )
    rng = np.random.default_rng(0)
    drawn = rng.integers(3, actor.architecture.vocab_size, (asked.sequences, asked.tokens), dtype=np.int32)
    sequences = [TokenSequence(prompt_ids=row[:1], answer_ids=row[1:], num_trained=asked.tokens - 1) for row in drawn]
    tokens = asked.sequences * asked.tokens
    forward = forward_flops(actor.architecture, asked.sequences, asked.tokens)

    def learn() -> None:
        actor.learn_supervised(sequences, tokens - asked.sequences)

    for name, action, flops in (("score", lambda: actor.score(sequences), forward), ("learn", learn, 3 * forward)):
        seconds = median_s(action, asked.rounds)
        rates = f"{tokens / seconds:,.0f} tokens/s, {flops / seconds / 1e12:.2f} TFLOP/s"
        print(f"{name}: {seconds:.4f} s, {rates}", flush=True)
    if on_cuda:
        print(f"peak {torch.cuda.max_memory_allocated() / 2**30:.2f} GiB on {torch.cuda.get_device_name()}")
    if asked.kernels:
        activities = [ProfilerActivity.CUDA] if on_cuda else [ProfilerActivity.CPU]
        with profile(activities=activities) as seen:
            learn()
        by = "self_device_time_total" if on_cuda else "self_cpu_time_total"
        print(seen.key_averages().table(sort_by=by, row_limit=asked.kernels, max_name_column_width=90))


if __name__ == "__main__":
    main()
