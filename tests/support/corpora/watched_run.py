"""A run folder written line by line as a run writes it, of any size, for the tests of `hacpo-mega watch`.

`python tests/support/corpora/watched_run.py FOLDER 10000 100` writes 10,000 steps of 100 answers and prints how long
the watch's index and its questions take on it, and the memory of the process that holds them.
"""

import json
import random
import resource
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hacpo_mega.logbook.files.metrics import MetricsWriter
from hacpo_mega.logbook.files.rollout_log import RolloutLog

AGENTS = ("qwen", "llama")
SKILLS = ("add", "mul", "sub")
PHASES = ("roll_out", "judge", "exchange", "score", "learn", "publish", "wait", "other")
OF_AGENT = (
    *("reward_mean", "answer_tokens_mean", "truncated", "engine_gap_mean", "grad_norm", "lr", "logprob_mean", "kl"),
    *(f"self/{name}" for name in ("ratio_mean", "clipped", "positive_share")),
    *(f"view/num_{number}" for number in range(16)),
    *(f"{table}/{name}_s" for table in ("phase", "phase_mean") for name in PHASES),
    *(f"own/metric_{number}" for number in range(24)),
    *("step_s", "rss_bytes", "device_bytes"),
)
OF_PAIR = ("inside", "above", "below", "ratio_mean", "ratio_max", "positive_share", "grad_cosine", "grad_share")


class WatchedRun:
    """Writes a run's folder. Numbers and texts are functions of the seed and the step alone."""

    def __init__(self, folder: Path, num_steps: int = 10, seed: int = 7) -> None:
        self.folder, self._seed, self.num_steps = folder, seed, num_steps
        folder.mkdir(parents=True)
        tables = "".join(f'[[agents]]\nname = "{name}"\nmodel = "models/{name}"\n' for name in AGENTS)
        text = f'run_dir = "{folder}"\nseed = {seed}\nnum_steps = {num_steps}\nlanes = 1\n{tables}'
        (folder / "config.toml").write_text(text)
        self.start(0)

    def start(self, steps_done: int) -> None:
        """A start by the run's own writers, which let the lines of later steps go."""
        start = {"time_unix_s": time.time(), "steps_done": steps_done, "commit": "c0ffee", "packages": {}}
        with (self.folder / "starts.jsonl").open("a") as file:
            file.write(json.dumps(start) + "\n")
        (self.folder / "rollouts").mkdir(exist_ok=True)
        if steps_done:
            MetricsWriter(self.folder, steps_done).close()
            RolloutLog(self.folder, 0, AGENTS, 0, lambda payload: [payload], writes=True, steps_done=steps_done)

    def metrics_line(self, step: int, **changes: float) -> str:
        """The line of a step; `changes` are by the name of an agent's metric, for all agents."""
        draw = random.Random(f"{self._seed} {step}")
        values: dict[str, float] = {}
        for agent, other in (AGENTS, AGENTS[::-1]):
            values |= {f"agent/{agent}/{name}": round(draw.random(), 6) for name in OF_AGENT}
            values |= {f"agent/{agent}/from/{other}/{name}": round(draw.random(), 6) for name in OF_PAIR}
            fates = {"answers": 40, "trained": 30, "zero_advantage": 8, "too_long": 2}
            values |= {f"agent/{agent}/from/{other}/view/num_{name}": number for name, number in fates.items()}
            values |= {f"agent/{agent}/num_trained_answers": 70.0, f"omega/{agent}/{other}": 1.0 + draw.random()}
            values |= {f"agent/{agent}/{name}": value for name, value in changes.items()}
            if step % 10 == 0:
                values |= {f"agent/{agent}/accuracy": 0.25, f"agent/{agent}/num_evaluated": 400.0}
        timing = {name: values.pop(name) for name in list(values) if name.endswith(("_s", "_bytes"))}
        return json.dumps({"step": step, "values": values, "timing": {"time_unix_s": 1e9 + step} | timing}) + "\n"

    def add_metrics(self, step: int, **changes: float) -> None:
        """Appends the line of a step."""
        with (self.folder / "metrics.jsonl").open("a") as file:
            file.write(self.metrics_line(step, **changes))

    def add_answers(self, step: int, texts: Sequence[str], lane: int = 0, per_prompt: int = 20, **fields: Any) -> None:
        """Writes a lane's answers of a step, `per_prompt` to each prompt, the agents in turn."""
        draw, lines = random.Random(f"{self._seed} {step} {lane}"), []
        for number, first in enumerate(range(0, len(texts), per_prompt)):
            answers = []
            for rollout, text in enumerate(texts[first : first + per_prompt]):
                agent, reward = AGENTS[rollout % 2], float(draw.random() < 0.5)
                numbers = {name: round(draw.uniform(0.3, 3.0), 5) for name in AGENTS}
                answers.append(
                    {"agent": agent, "rollout": rollout // 2, "text": text, "reward": reward}
                    | {"verdict": "correct" if reward else "wrong", "stop": "eos", "num_tokens": len(text) // 4}
                    | {"mean_logprob": -0.5, "advantage": numbers, "ratio": numbers, "not_trained": {}}
                    | fields
                )
            lines.append(
                {"step": step, "lane": lane, "prompt_index": number, "id": f"prompt{number}", "gold": "44"}
                | {"skill": SKILLS[number % 3], "prompt": f"{number}+{step}=", "prompt_seen": {}, "answers": answers}
            )
        path = self.folder / "rollouts" / f"step_{step:06d}.lane_{lane:04d}.jsonl"
        path.with_suffix(".new").write_text("".join(json.dumps(line) + "\n" for line in lines))
        path.with_suffix(".new").replace(path)


def _measure(folder: Path, num_steps: int, num_answers: int) -> None:
    from hacpo_mega.watch.answers import page_of_answers
    from hacpo_mega.watch.runs import Watched
    from hacpo_mega.watch.views import VerdictViews, curves, job

    if not folder.exists():
        run, draw = WatchedRun(folder, num_steps), random.Random(0)
        words = ["".join(draw.choices("abcdefghijklmnopqrstuvwxyz", k=draw.randint(2, 9))) for _ in range(20_000)]
        for step in range(1, num_steps + 1):
            run.add_metrics(step)
            run.add_answers(step, ["The " + " ".join(draw.choices(words, k=50)) for _ in range(num_answers)])
    began = time.monotonic()
    watched = Watched(folder, None, print)
    while watched.index.extend():
        pass
    size_mib = watched.index.path.stat().st_size / 2**20
    print(f"index built or extended in {time.monotonic() - began:.1f} s, {size_mib:.0f} MiB", flush=True)
    names = [f"agent/{a}/{n}" for a in AGENTS for n in ("accuracy", "reward_mean", "step_s", "lr", "view/num_3", "kl")]
    questions = {
        "chooser": lambda: curves(watched, [], None, None),
        "12 curves": lambda: curves(watched, names, None, None),
        "job": lambda: job(watched),
        "verdicts": lambda: VerdictViews().of(watched),
        "newest answers": lambda: page_of_answers(watched.index, {}, "-step", 0),
        "page 9,000": lambda: page_of_answers(watched.index, {}, "-step", 9000),
        "rare text": lambda: page_of_answers(watched.index, {"text": "abc"}, "-step", 0),
        "frequent text": lambda: page_of_answers(watched.index, {"text": "the"}, "-step", 0),
        "filters": lambda: page_of_answers(watched.index, {"agent": "qwen", "reward": [0, 0.5]}, "-step", 0),
        "by ratio": lambda: page_of_answers(watched.index, {"ratio": [2, None]}, "-ratio", 0),
        "regex": lambda: page_of_answers(watched.index, {"regex": r"qu\w+ za"}, "-step", 0),
    }
    for name, ask in questions.items():
        began, used = time.monotonic(), time.process_time()
        found = ask()
        seconds, processor_s = time.monotonic() - began, time.process_time() - used
        facts = f"{found.get('total', '')} {found.get('note', '')}"
        print(f"{name:16} {seconds:6.3f} s, of a processor {processor_s:6.3f} s  {facts}")
    print(f"memory at most {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024:.0f} MiB")


if __name__ == "__main__":
    _measure(Path(sys.argv[1]), *map(int, sys.argv[2:]))
