"""The savings of engines on ranks of their own, one step off: `python apart_benchmark.py [FOLDER] [STEPS]`.

One agent of random weights under gspo, one core a process: one process that trains and answers in turns of its threads,
against one that trains and one that answers, which gives the same bits. Beside them what else two cores can do: one
process on both, whose engine's thread has a core to itself, and two cells. Most answers of a random model are as long
as they may be. Each line has the median of the seconds of STEPS steps
(20) after the first two, and the answers' seconds that are hidden; models of the quickstart's size and of 10 million
parameters, written to FOLDER (build/apart) when they are not there.
"""

import os
import statistics
import sys
from pathlib import Path

sys.path.extend(str(Path(__file__).resolve().parents[3] / "tests" / "support" / folder) for folder in ("", "cases"))

from job import play_command, run_ranks
from run_cases import CHARACTERS, write_config
from tiny_models import make_model

from hacpo_mega.logbook.files.metrics import read_metrics
from hacpo_mega.samples.tokenizers import make_tokenizer

SIZES = {
    "quickstart": {
        "num_layers": 3, "hidden_size": 64, "num_heads": 2, "num_kv_heads": 1, "head_dim": 32, "ffn_size": 192,
    },
    "10M": {
        "num_layers": 6, "hidden_size": 384, "num_heads": 12, "num_kv_heads": 4, "head_dim": 32, "ffn_size": 1024,
    },
}  # fmt: skip
PROMPTS = {"quickstart": 64, "10M": 8}  # of a step, eight answers each
WARM_UP = 2
ONE_CORE_EACH = ((0,), (1,))
WAYS = {
    "colocated, one core": ((), ((0,),)),
    "apart, a core each": (("placement=apart", "agents.one.rollout_gpus=1"), ONE_CORE_EACH),
    "colocated, both cores": ((), ((0, 1),)),
    "two cells, a core each": (("agents.one.cells_per_lane=2",), ONE_CORE_EACH),
}


def pinned(cores: tuple[tuple[int, ...], ...], *arguments: str) -> None:
    """`hacpo-mega ARGUMENTS` on this rank's share of the processors that the machine gives us."""
    mine, allowed = cores[int(os.environ["RANK"])], sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, [allowed[core] for core in mine])
    play_command(*arguments)


def config_of(home: Path, size: str, rollout: dict, training: dict, num_steps: int) -> Path:
    """One agent of random weights alone, eight answers a prompt; it is made in `home` when it is not there."""
    if not (home / "one").exists():
        make_model(home / "one", "qwen3", vocab_size=len(CHARACTERS) + 2, tied=True, seed=1, **SIZES[size])
        make_tokenizer(home / "one", CHARACTERS)
    return write_config(
        home,
        [{"name": "one", "model": str(home / "one"), "optimizer": {"lr": 1e-6}}],
        num_steps=num_steps,
        algorithm={"method": "gspo"},
        rollout={"rollouts_per_prompt": 8, "max_prompt_tokens": 8, **rollout},
        training=training,
        evaluation={"num_prompts": 8},
        checkpoint={"every_steps": 0},
    )


def main(folder: Path, num_steps: int) -> None:
    """Prints a line for each size and way."""
    for size in SIZES:
        rollout = {"max_answer_tokens": 24, "one_step_off": True}
        training = {
            "prompts_per_step": PROMPTS[size],
            "prompts_per_update": PROMPTS[size] // 4,
            "max_tokens_per_microbatch": 8192,
        }
        config = config_of(folder / size, size, rollout, training, WARM_UP + num_steps)
        for way, (overrides, cores) in WAYS.items():
            run_dir = folder / size / way.replace(" ", "_").replace(",", "")
            run_ranks(len(cores), pinned, cores, "train", str(config), f"run_dir={run_dir}", "--fresh", *overrides)
            steps = read_metrics(run_dir / "metrics.jsonl")
            counted = [steps[step].timing for step in range(WARM_UP + 1, WARM_UP + num_steps + 1)]
            seconds = [timing["agent/one/step_s"] for timing in counted]
            parts = {
                part: statistics.median(timing.get(f"agent/one/{key}", 0.0) for timing in counted)
                for part, key in (
                    ("learn", "phase/learn_s"), ("roll_out", "phase/roll_out_s"), ("publish", "phase/publish_s"),
                    ("hidden", "roll_out_hidden_s"),
                )
            }  # fmt: skip
            said = "  ".join(f"{part} {value:.3f}" for part, value in parts.items())
            spread = f"{min(seconds):.3f} to {max(seconds):.3f}"
            print(f"{size:10}  {way:24}  {statistics.median(seconds):.3f} s a step ({spread})  {said}", flush=True)


if __name__ == "__main__":
    given = sys.argv[1:]
    main(Path(given[0] if given else "build/apart").resolve(), int(given[1]) if len(given) > 1 else 20)
