"""The owners of a step's processor time: py-spy samples one agent's steady steps under GSPO, native frames too.

    OMP_NUM_THREADS=1 .venv/bin/python profile_shares.py PY_SPY [quickstart 10M 60M]

PY_SPY is the command of an environment that has it. `quickstart` wants runs/models/qwen (`hacpo-mega init`), the others
are of launch/peers/grid.py: vocabulary 300, prompts of 20 tokens, a long tail. Phases are measured by the clock of the
process, what each consists of by samples that do not wait. The raw stacks stay in build/profile/NAME.
"""

import ast
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT / "launch" / "peers"))

from grid import WARM_UP, Cell, workload_of, write_inputs  # noqa: E402

from hacpo_mega.cluster.machine.environment import prepare_environment  # noqa: E402
from hacpo_mega.config import load_config  # noqa: E402

STEPS, RATE = 6, 25  # a second: one that is too much for py-spy falls behind where stacks are deep
TRAINER = ROOT / "hacpo_mega/trainer/trainer.py"
PRODUCTS = re.compile(r"mkl_|gemm|dnnl|cblas|onednn|product|_ops::(mm|addmm|bmm|baddbmm|linear)::")
WAITING = re.compile(r"acquire_lock|take_gil|cond_(timed)?wait|poll|recv|sleep")
OWNERS = {"vllm": "vLLM", "megatron": "Megatron", "torch": "operators"}
COLUMNS = ("products", "attention", "operators", "vLLM", "Megatron", "ours", "gc")
PHASES = ("roll_out", "judge", "score", "exchange", "learn", "publish", "other")


def main() -> None:
    """Profiles what is asked for, one after the other."""
    prepare_environment()
    from hacpo_lab.experiments.campaign import PRELOAD
    from hacpo_lab.forked import JobServer

    server = JobServer(PRELOAD)
    for name in sys.argv[2:] or ("quickstart", "10M", "60M"):
        folder = ROOT / "build" / "profile" / name
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        if server.run(1, folder, rank, *inputs(name, folder), sys.argv[1], str(folder)) != [0]:
            sys.exit(f"{name} failed: {(folder / '0.err').read_text()[-2000:]}")
        print(f"\n{name}: {table(folder)}", flush=True)


def inputs(name: str, folder: Path) -> tuple[str, Any]:
    """The configuration of one agent, and the workload that says how long its answers are."""
    from hacpo_lab.throughput.schedules import STEPS_ONLY
    from hacpo_lab.throughput.workload import Workload
    from hacpo_mega.logbook.run.run_folder import resolved_toml

    file, workload = ROOT / "configs/quickstart.toml", Workload(15)
    if name != "quickstart":
        cell = Cell(name, 300, 20)
        file, workload = write_inputs(cell, folder, WARM_UP + STEPS), workload_of(cell, ["tail"] * STEPS)
    config = load_config(file, [f"run_dir={folder}/run", *STEPS_ONLY, "algorithm.method=gspo"])
    told = resolved_toml(config.model_copy(update={"agents": config.agents[:1]}))
    (folder / "run.toml").write_text(told, encoding="utf-8")
    return str(folder / "run.toml"), workload


def rank(config_file: str, workload: Any, spy: str, folder: str) -> None:
    """Steps while py-spy looks at this process."""
    from hacpo_lab.throughput.measured_trainer import measured_trainer

    asked = ["--native", "--full-filenames", "--format", "raw", "--rate", str(RATE), "-o", f"{folder}/stacks"]
    with measured_trainer(load_config(config_file), workload) as trainer:
        trainer.step()
        with subprocess.Popen([spy, "record", *asked, "-p", str(os.getpid())]) as watcher:
            time.sleep(25.0)  # it reads the symbols of all libraries first
            for _ in range(STEPS):
                trainer.step()
            watcher.send_signal(signal.SIGINT)


def phase_lines() -> dict[int, str]:
    """The lines of the trainer that are inside a `with self.phase("...")`."""
    found = {}
    for node in ast.walk(ast.parse(TRAINER.read_text(encoding="utf-8"))):
        if isinstance(node, ast.With) and (name := re.match(r"self\.phase\('(\w+)'", ast.unparse(node.items[0]))):
            found |= dict.fromkeys(range(node.lineno, node.end_lineno + 1), name[1])
    return found


def owner(frames: list[str]) -> str:
    """The owner of a sample: a kernel, torch's compiled code, else the innermost package."""
    python = [place for place, frame in enumerate(frames) if ".py:" in frame]
    native = "\n".join(frames[python[-1] + 1 :])
    if re.search("attention|attn", native, re.IGNORECASE):
        return "attention"
    callers = "".join(frames[place].partition(" ")[0] for place in python[-3:])  # compiled at run time: without a name
    if PRODUCTS.search(native + callers):
        return "products"
    for sign, who in {"gc_collect": "gc", "torch|c10|vllm": "operators"}.items():
        if re.search(sign, native):
            return who
    for place in reversed(python):
        found = re.search(rf"{ROOT}/(hacpo_mega)/|site-packages/(\w+)/", frames[place])
        if found and (found[1] or found[2] in OWNERS):
            return OWNERS.get(found[2], "ours")
    return "ours"


def samples(stacks: Path) -> Counter[tuple[str, str]]:
    """The number of samples of the thread that trains, by phase and owner."""
    known, found = phase_lines(), Counter()
    for line in stacks.read_text(encoding="utf-8", errors="replace").splitlines():
        stack, _, count = line.rpartition(" ")
        at = [int(number) for number in re.findall(r"trainer/trainer\.py:(\d+)\)", stack)]
        if at and not WAITING.search(stack.rpartition(".py:")[2]):
            found[next((known[number] for number in at if number in known), "other"), owner(stack.split(";"))] += int(
                count
            )
    return found


def clock(run: Path) -> dict[str, float]:
    """Core-seconds of a step by phase, of all threads, as the trainer has noted them; what is small is in `other`."""
    steps = [json.loads(line)["timing"] for line in (run / "metrics.jsonl").read_text().splitlines()][1:]
    spent = Counter()
    for key, seconds in (pair for step in steps for pair in step.items()):
        if match := re.fullmatch(r"agent/\w+/cpu/(\w+)_s", key):
            spent[match[1] if match[1] in PHASES else "other"] += seconds / len(steps)
    return {phase: spent[phase] for phase in PHASES}


def table(folder: Path) -> str:
    """Markdown: percent of a step's core-seconds. A phase's are the clock's, its owners' are its samples'."""
    found, spent, shares = samples(folder / "stacks"), clock(folder / "run"), Counter()
    for (phase, who), count in found.items():
        in_phase = sum(n for (p, _), n in found.items() if p == phase)
        shares[phase, who] = 100 * spent[phase] / sum(spent.values()) * count / in_phase
    lines = [f"{sum(spent.values()):.2f} core-seconds a step, {found.total()} samples\n"]
    lines += [f"| % | {' | '.join(COLUMNS)} | all |", "|---" * (len(COLUMNS) + 2) + "|"]
    for phase in (*PHASES, "all"):
        cells = [sum(n for (p, w), n in shares.items() if w == who and phase in (p, "all")) for who in COLUMNS]
        lines.append(f"| {phase} | {' | '.join(f'{cell:.0f}' for cell in (*cells, sum(cells)))} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
