"""hacpo_mega beside TRL over sizes, vocabularies, prompts and lengths of answers: one agent, one table.

    make bench-peers-grid                                            the whole grid; goes on where it was stopped
    make bench-peers-grid GRID="--sizes 10M 60M --prompts 20"        a part of it

All trainers of a model live side by side and take measured steps by turns, one while the others wait. GSPO, 8 answers
to a prompt, random weights (the work does not depend on them); answers of one length, and of a long tail. hacpo_mega is
there as one process on all cores and as one a core, and the table has the faster. What differs from TRL:
docs/measurements/peers.md. Every finished part lies in --out as JSON and is not measured again. Cores are those that
the process may use (taskset).
"""

import argparse
import json
import math
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from bench import THEIRS, WARM_UP, Machine, checked
from paced import paced_job, say, wait
from table import Turn, grid_markdown

from hacpo_mega.cluster.environment import prepare_environment
from hacpo_mega.cluster.machine_limits import num_cores
from hacpo_mega.config import InitConfig

if TYPE_CHECKING:
    from hacpo_mega.lab.throughput.workload import Workload

G = 8
LONGEST, EQUAL = 48, 24
LENGTHS = ("equal", "tail")
MOST_WORK = 1e12  # parameters times tokens of all steps
# {lengths: {number of hacpo_mega's processes, or TRL: turns by round}}
Measured = dict[str, dict[str, list[Turn]]]
TAIL = statistics.NormalDist(3.0, 0.5)  # of the logarithm of tokens: mean 22


@dataclass(frozen=True)
class Size:
    """A Qwen3 without its embedding, and the prompts of a step: {tokens of a prompt: (prompts, updates)}."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    prompts: dict[int, tuple[int, int]]


SIZES = {
    "1M": Size(128, 5, 4, 2, 32, 384, {20: (32, 4), 400: (4, 2)}),
    "10M": Size(384, 6, 6, 2, 64, 1024, {20: (16, 4), 400: (2, 2)}),
    "60M": Size(768, 10, 12, 4, 64, 2048, {20: (4, 2), 400: (1, 1)}),
    "120M": Size(1024, 11, 16, 4, 64, 2816, {20: (2, 1), 400: (1, 1)}),
}
VOCABULARIES = (300, 32000)
# Left out unless asked for by --everything: minutes that show nothing new.
LEFT_OUT = [("60M", 32000, 400), ("120M", 32000, 400)]


@dataclass(frozen=True)
class Cell:
    """One model and its prompts."""

    size: str
    vocabulary: int
    prompt_tokens: int

    @property
    def name(self) -> str:
        """Of its file."""
        return f"{self.size}_v{self.vocabulary}_p{self.prompt_tokens}"

    @property
    def num_prompts(self) -> int:
        """Of a step."""
        return SIZES[self.size].prompts[self.prompt_tokens][0]

    @property
    def num_updates(self) -> int:
        """Of a step."""
        return SIZES[self.size].prompts[self.prompt_tokens][1]


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--vocabularies", nargs="+", type=int, choices=VOCABULARIES, default=list(VOCABULARIES))
    parser.add_argument("--prompts", nargs="+", type=int, choices=(20, 400), default=[20, 400], help="tokens of one")
    parser.add_argument("--everything", action="store_true", help=f"also {LEFT_OUT}")
    parser.add_argument("--peer", type=Path, default=Path("build/peers-env/bin/python"), help="a Python that has TRL")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("build/peers-grid"), help="folder of grid.md and of the parts")
    return parser.parse_args()


def cells(asked: argparse.Namespace) -> list[Cell]:
    """The part of the grid that was asked for, the cheap ones first."""
    found = [(s, v, p) for p in asked.prompts for s in asked.sizes for v in asked.vocabularies]
    return [Cell(*cell) for cell in found if asked.everything or cell not in LEFT_OUT]


def write_inputs(cell: Cell, folder: Path, num_steps: int) -> Path:
    """A model folder, its prompts, and the configuration of a run on them, whose file is returned."""
    import tokenizers
    from transformers import PreTrainedTokenizerFast

    from hacpo_mega.commands.warm_start import random_model
    from hacpo_mega.samples.tokenizers import EOS, PAD

    size, words = SIZES[cell.size], [f"w{number}" for number in range(cell.vocabulary - 2)]
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel({w: i for i, w in enumerate((PAD, EOS, *words))}))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, pad_token=PAD, eos_token=EOS)
    tokenizer.save_pretrained(folder / "model")
    shape = InitConfig(
        family="qwen3",
        num_layers=size.layers,
        hidden_size=size.hidden,
        num_heads=size.heads,
        num_kv_heads=size.kv_heads,
        head_dim=size.head_dim,
        ffn_size=size.ffn,
        tied_embeddings=True,
        max_positions=1024,
        vocabulary=(),
    )
    random_model(folder / "model", shape, tokenizer, seed=1)
    draw = random.Random(1)
    texts = [" ".join(draw.choices(words, k=cell.prompt_tokens)) for _ in range(num_steps * cell.num_prompts)]
    rows = [json.dumps({"prompt": text, "answer": words[0]}) for text in texts]
    (folder / "prompts.jsonl").write_text("\n".join(rows) + "\n", encoding="utf-8")
    file = folder / "grid.toml"
    file.write_text(
        f"""
run_dir = "{folder}/run"
num_steps = {num_steps + 1}
algorithm = {{ method = "gspo" }}
data = {{ files = ["{folder}/prompts.jsonl"] }}
reward = {{ kind = "exact" }}
rollout = {{ rollouts_per_prompt = {G}, max_prompt_tokens = {cell.prompt_tokens}, max_answer_tokens = {LONGEST} }}
training = {{ prompts_per_step = {cell.num_prompts}, prompts_per_update = {cell.num_prompts // cell.num_updates} }}
agents = [{{ name = "{cell.size}", model = "{folder}/model", optimizer = {{ lr = 1e-6 }} }}]
""",
        encoding="utf-8",
    )
    return file


def lengths_of(kind: str, num_answers: int, seed: int) -> list[int]:
    """Tokens of a step's answers: of one length, or evenly spread quantiles of a long tail, in random order."""
    if kind == "equal":
        return [EQUAL] * num_answers
    quantiles = (TAIL.inv_cdf((place + 0.5) / num_answers) for place in range(num_answers))
    lengths = [min(LONGEST, max(1, round(math.exp(value)))) for value in quantiles]
    lengths[-1] = LONGEST
    random.Random(seed).shuffle(lengths)
    return lengths


def workload_of(cell: Cell, kinds: Sequence[str]) -> "Workload":
    """What both trainers are to do; the warm-up is of the longest."""
    from hacpo_mega.lab.throughput.workload import Workload

    steps = []
    for number, kind in enumerate([LENGTHS[-1]] * WARM_UP + [*kinds]):
        lengths = lengths_of(kind, cell.num_prompts * G, number)
        groups = (lengths[start : start + G] for start in range(0, len(lengths), G))
        answers = (tuple((tokens, float(g % 2)) for g, tokens in enumerate(group)) for group in groups)
        steps.append({(cell.size, prompt): group for prompt, group in enumerate(answers)})
    return Workload(LONGEST, tuple(steps))


def measure(cell: Cell, asked: argparse.Namespace, peer: dict[str, str], work: Path) -> Measured:
    """Every trainer takes every step of every kind of lengths, one after the other. RuntimeError when one fails."""
    kinds, cores = LENGTHS * rounds_of(cell, asked.rounds), num_cores()
    file = write_inputs(cell, work, WARM_UP + len(kinds))
    asked = argparse.Namespace(**{**vars(asked), "config": file, "overrides": [], "steps": len(kinds)})
    config, _ = checked(asked)
    workload = workload_of(cell, kinds)
    machine = Machine(config, workload, asked, peer)
    with ExitStack() as stack:
        theirs = stack.enter_context(machine.peer_process(0, work, cores))
        stack.callback(theirs.kill)
        try:
            jobs = {}
            for size in processes_of(cell, cores):
                run = with_processes(file, size)
                job = paced_job(machine.server, size, run.parent / f"ours_{size}", run, len(kinds), workload)
                jobs[str(size)] = stack.enter_context(job)
            for job in jobs.values():
                job.is_ready()
            wait(theirs.stdout)
            for _ in kinds:
                for job in jobs.values():
                    job.step()
                say(theirs.stdin, "go")
                wait(theirs.stdout)
            tokens = [sum(n for group in step.values() for n, _ in group) for step in workload.steps[WARM_UP:]]
            found = {size: job.turns(tokens) for size, job in jobs.items()}
        except OSError as error:
            said = [f"{name.relative_to(work)}: {name.read_text(errors='replace')[-1500:]}" for name in errors_of(work)]
            raise RuntimeError(f"a trainer of {cell.name} failed ({error}). {' '.join(said)}") from error
        theirs.communicate()
    found[THEIRS] = machine.read(0, work, cores)
    return {
        kind: {trainer: turns[place :: len(LENGTHS)] for trainer, turns in found.items()}
        for place, kind in enumerate(LENGTHS)
    }


def rounds_of(cell: Cell, asked: int) -> int:
    """Fewer than asked where a part would take more than some three minutes of two quiet cores; at least one."""
    tokens = cell.num_prompts * G * (cell.prompt_tokens + LONGEST)
    return max(1, min(asked, int(MOST_WORK / (len(LENGTHS) * tokens * num_parameters(cell)))))


def num_parameters(cell: Cell) -> int:
    """Without norms."""
    size = SIZES[cell.size]
    layer = size.hidden * (2 * (size.heads + size.kv_heads) * size.head_dim + 3 * size.ffn)
    return size.layers * layer + cell.vocabulary * size.hidden


def errors_of(work: Path) -> list[Path]:
    """The files of what trainers have said before they ended."""
    return [file for file in (*work.glob("ours_*/*.err"), work / "0" / "err") if file.stat().st_size]


def processes_of(cell: Cell, cores: int) -> list[int]:
    """Of hacpo_mega, each a cell of its own: one that has all cores, and as many as share cores and prompts evenly."""
    return sorted({1, math.gcd(cores, cell.num_prompts // cell.num_updates)})


def with_processes(file: Path, size: int) -> Path:
    """A configuration of so many lanes beside that of one."""
    changed = file.with_name(f"lanes_{size}.toml")
    text = file.read_text(encoding="utf-8").replace(f"{file.parent}/run", f"{file.parent}/run_{size}")
    changed.write_text(f"lanes = {size}\n{text}", encoding="utf-8")
    return changed


def row_name(cell: Cell, kind: str) -> tuple[str, ...]:
    """What a row of the table is of (table.GRID_WORK)."""
    tokens = f"{EQUAL}" if kind == "equal" else kind
    return (
        f"{num_parameters(cell) / 1e6:.1f}M",
        f"{cell.vocabulary}, {cell.prompt_tokens}",
        f"{cell.num_prompts * G}, {tokens}",
    )


def faster(found: Measured) -> str:
    """The number of processes with which hacpo_mega has taken the fewest seconds over all that was measured."""
    sizes = [size for size in found[LENGTHS[0]] if size != THEIRS]
    return min(sizes, key=lambda size: sum(turn.wall_s for kind in LENGTHS for turn in found[kind][size]))


def found_before(file: Path, made_with: dict[str, object]) -> Measured | None:
    """A part that was finished so; None: there is none."""
    found = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    if found.pop("made with", None) != made_with:
        return None
    return {kind: {who: [Turn(**turn) for turn in turns] for who, turns in found[kind].items()} for kind in LENGTHS}


def write_part(file: Path, made_with: dict[str, object], found: Measured) -> None:
    """What `found_before` reads; a file that was begun is none."""
    told = {kind: {who: [asdict(turn) for turn in turns] for who, turns in found[kind].items()} for kind in LENGTHS}
    begun = file.with_suffix(".begun")
    begun.write_text(json.dumps({"made with": made_with, **told}), encoding="utf-8")
    begun.rename(file)


def run(asked: argparse.Namespace, peer: dict[str, str]) -> str:
    """Measures what is missing; the table of all that was asked for. RuntimeError when parts of it failed."""
    from hacpo_mega.logbook.provenance import source_commit

    rows, failed = {}, []
    made_with = {"commit": source_commit() or "unknown", "rounds": asked.rounds, "cores": num_cores()}
    asked.out.mkdir(parents=True, exist_ok=True)
    for cell in cells(asked):
        file, began = asked.out / f"{cell.name}.json", time.monotonic()
        if (found := found_before(file, made_with)) is None:
            try:
                with tempfile.TemporaryDirectory(prefix="hacpo_grid_") as work:
                    found = measure(cell, asked, peer, Path(work))
            except RuntimeError as error:  # the others are worth their minutes
                failed.append(str(error))
                print(error, file=sys.stderr, flush=True)
                continue
            write_part(file, made_with, found)
            print(f"{cell.name}: {time.monotonic() - began:.0f} s; {said_of(found)}", flush=True)
        for kind in LENGTHS:
            ours = faster(found)
            rows[*row_name(cell, kind), ours] = found[kind][ours], found[kind][THEIRS]
        (asked.out / "grid.md").write_text(grid_markdown(rows), encoding="utf-8")
    if failed:
        raise RuntimeError(f"{len(failed)} parts failed; the others: {asked.out}/grid.md")
    return grid_markdown(rows)


def said_of(found: Measured) -> str:
    """Seconds a step of each trainer, of processors in brackets."""
    said = []
    for who in found[LENGTHS[0]]:
        turns = [turn for kind in LENGTHS for turn in found[kind][who]]
        wall_s, cpu_s = (sum(seconds) / len(turns) for seconds in zip(*((turn.wall_s, turn.cpu_s) for turn in turns)))
        said.append(f"{who if who == THEIRS else f'{who} process(es)'} {wall_s:.2f} s a step ({cpu_s:.2f})")
    return ", ".join(said)


def main() -> None:
    """Measures, prints and writes the table. Exit 2 with a line for bad input, 1 when a trainer fails."""
    asked = arguments()
    # The user's, less PYTHONPATH: the folder `kernels` of this repository would shadow a package of theirs.
    peer = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {"HF_HUB_OFFLINE": "1"}
    os.environ.pop("OMP_NUM_THREADS", None)  # cores are shared by the processes of a trainer
    prepare_environment()
    try:
        print("\n" + run(asked, peer))
    except ValueError as error:
        sys.exit(print(error, file=sys.stderr) or 2)
    except RuntimeError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
