"""The cost of the engine alone on the CPU: core-seconds of one step's answers, by one thread.

    OMP_NUM_THREADS=1 python engine_benchmark.py MODEL [--answers 512] [--tokens 15] [--prompt 6]

The least and the median of all rounds, after one of warm-up. Under another tree's code: PYTHONPATH=TREE before it.
"""

import argparse
import json
import statistics
import time
from pathlib import Path

from hacpo_mega.cluster.machine.environment import prepare_environment

prepare_environment()

import numpy as np  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

from hacpo_mega.rollout.engine import Engine  # noqa: E402
from hacpo_mega.rollout.vllm.engine_spec import EngineSpec  # noqa: E402


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--answers", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=15, help="of every answer")
    parser.add_argument(
        "--prompt", type=int, default=6, help="tokens of every prompt, of which eight in turn are equal"
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--vllm", type=json.loads, default={}, metavar="JSON", help="engine arguments (agents.vllm)")
    return parser.parse_args()


def main() -> None:
    asked = arguments()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    longest = asked.prompt + asked.tokens
    engine = Engine(EngineSpec(asked.model, max_model_len=longest + 1, dtype=torch.float32, options=asked.vllm))
    rng = np.random.default_rng(0)
    prompts = [rng.integers(3, 15, asked.prompt).tolist() for _ in range(-(-asked.answers // 8))]
    how = {"max_tokens": asked.tokens, "lengths": [asked.tokens] * asked.answers, "return_logprobs": True}
    took = []
    for number in range(asked.rounds + 1):
        start = time.process_time()
        seeds = range(number * asked.answers, (number + 1) * asked.answers)
        engine.generate([prompts[n // 8] for n in range(asked.answers)], seeds, **how)
        took.append(time.process_time() - start)
    cpu_s = took[1:]
    print(f"core-seconds: least {min(cpu_s):.3f}, median {statistics.median(cpu_s):.3f} of {asked.rounds}", flush=True)
    engine.close()


if __name__ == "__main__":
    main()
