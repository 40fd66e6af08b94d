"""Memory that scoring and learning need beyond their inputs and outputs, on a CPU, over the number of tokens.

    python kernels/bench/memory.py                  Markdown: growth in MiB at vocabulary 151,936

Every number comes from a process of its own: its peak resident memory during the call, less that after a warm-up on
one row, when weight, hidden states and every library are in memory already. `all logits` is the same in ordinary torch.
"""

import argparse
import os
import resource
import subprocess
import sys

import torch
from hacpo_kernels import linear_logprob
from harness import commit_name, device_name

HIDDEN, VOCAB = 64, 151_936


def all_logits(hidden: torch.Tensor, weight: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (hidden @ weight.T).log_softmax(dim=1).gather(1, target[:, None])[:, 0]


def probe(way: str, learns: bool, num_tokens: int) -> float:
    """Growth of the peak in this process, MiB."""
    torch.set_num_threads(1)
    function = linear_logprob if way == "ours" else all_logits
    hidden = torch.randn(num_tokens, HIDDEN, requires_grad=learns)
    weight = torch.randn(VOCAB, HIDDEN, requires_grad=learns)
    target = torch.randint(0, VOCAB, (num_tokens,))
    for rows in (slice(0, 1), slice(0, num_tokens)):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        logprob = function(hidden[rows], weight, target[rows])
        if learns:
            torch.autograd.grad(logprob.sum(), (hidden, weight))
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="*", default=[128, 256, 512, 1024, 2048, 4096, 8192])
    parser.add_argument("--all-logits-up-to", type=int, default=1024)
    parser.add_argument("--probe", nargs=3, metavar=("WAY", "LEARNS", "TOKENS"), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.probe:
        print(probe(given.probe[0], given.probe[1] == "learn", int(given.probe[2])))
        return 0
    print(
        f"{device_name(torch.device('cpu'))}, commit {commit_name()}, torch {torch.__version__}, H {HIDDEN}, V {VOCAB}"
    )
    print("| tokens | ours, score | ours, learn | all logits, score | all logits, learn | hidden states | logits |")
    print("|---|---|---|---|---|---|---|")
    for num_tokens in given.tokens:
        cells = []
        for way in ("ours", "all logits"):
            for call in ("score", "learn"):
                if way == "ours" or num_tokens <= given.all_logits_up_to:
                    asked = [sys.executable, __file__, "--probe", way, call, str(num_tokens)]
                    told = subprocess.run(asked, capture_output=True, text=True, check=True, env=os.environ)
                    cells.append(f"{float(told.stdout):.0f}")
                else:
                    cells.append("not run")
        sizes = (num_tokens * HIDDEN * 4 / 2**20, num_tokens * VOCAB * 4 / 2**20)
        print(f"| {num_tokens} | {' | '.join(cells)} | {sizes[0]:.2f} | {sizes[1]:.0f} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
