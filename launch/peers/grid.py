"""hacpo_mega beside TRL over sizes, vocabularies, prompts and lengths of answers: one agent, one table.

    make bench-peers-grid                                            the whole grid; goes on where it was stopped
    make bench-peers-grid GRID="--sizes 10M 60M --prompts 20"        a part of it

Both trainers of a model live side by side and take measured steps by turns, one while the other waits. GSPO, 8 answers
to a prompt, random weights (the work does not depend on them); answers of one length, and of a long tail. What differs
between the two: docs/measurements/peers.md. Every finished part lies in --out as JSON and is not measured again.
"""

import argparse
import json
import math
import os
import random
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from bench import WARM_UP, Machine, checked
from table import Turn, grid_markdown, resident

from hacpo_mega.cluster.environment import prepare_environment
from hacpo_mega.config import InitConfig, load_config

if TYPE_CHECKING:
    from hacpo_mega.lab.throughput.workload import Workload

G = 8
LONGEST, EQUAL = 48, 24
LENGTHS = ("equal", "tail")
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


def paced_rank(config_file: str, num_steps: int, workload: "Workload", line: str) -> None:
    """hacpo_mega's rank, in a process forked from the server: over the socket `line` it is told to take a step."""
    imported_bytes = resident("VmRSS")
    from hacpo_mega.lab.throughput.measured_trainer import measured_trainer

    steps, config, cpu_began = [], load_config(config_file), 0.0
    with socket.socket(socket.AF_UNIX) as connection, measured_trainer(config, workload) as trainer:
        connection.connect(line)
        told = connection.makefile("rw")
        for number in range(num_steps):
            if number >= WARM_UP:
                _say(told, "ready")
                told.readline()
            wall_began = time.perf_counter()
            trainer.step()
            # What is still written of a step after its end is processor time of the next.
            cpu_ended = time.process_time()
            steps.append((time.perf_counter() - wall_began, cpu_ended - cpu_began))
            cpu_began = cpu_ended
        _say(told, "ready")
        _say(told, json.dumps([steps[WARM_UP:], resident("VmHWM"), imported_bytes]))


def measure(cell: Cell, asked: argparse.Namespace, peer: dict[str, str], work: Path) -> dict[str, list[list[Turn]]]:
    """{lengths: [turns of hacpo_mega by round, turns of TRL]}. RuntimeError when a trainer fails."""
    kinds = LENGTHS * asked.rounds
    file = write_inputs(cell, work, WARM_UP + len(kinds))
    asked = argparse.Namespace(**{**vars(asked), "config": file, "overrides": [], "steps": len(kinds)})
    config, _ = checked(asked)
    workload, threads = workload_of(cell, kinds), int(os.environ.get("OMP_NUM_THREADS") or os.cpu_count() or 1)
    machine = Machine(config, workload, asked, peer)
    line = str(work / "line")
    call = (str(file), WARM_UP + len(kinds), workload, line)
    with ExitStack() as stack:
        listener = stack.enter_context(socket.socket(socket.AF_UNIX))
        listener.bind(line)
        listener.listen()
        theirs = stack.enter_context(machine.peer_process(0, work, threads))
        stack.callback(theirs.kill)
        (rank,) = stack.enter_context(machine.server.ranks(1, work, paced_rank, *call))
        try:
            with _accepted(listener, rank) as ours:
                steps, *memory = _in_turn(ours, (theirs.stdout, theirs.stdin), len(kinds))
        except OSError as error:
            said = [(work / name).read_text(errors="replace")[-1500:] for name in ("0.err", "0/err")]
            raise RuntimeError(f"a trainer of {cell.name} failed. hacpo_mega: {said[0]}\nTRL: {said[1]}") from error
        theirs.communicate()
    tokens = [sum(n for group in step.values() for n, _ in group) for step in workload.steps[WARM_UP:]]
    turns = [Turn(1, *took, number, number, *memory) for took, number in zip(steps, tokens, strict=True)]
    sides = (turns, machine.read(0, work, threads))
    return {kind: [side[place :: len(LENGTHS)] for side in sides] for place, kind in enumerate(LENGTHS)}


def _accepted(listener: socket.socket, rank: BaseProcess) -> TextIO:
    """The rank's end of the line; ConnectionError when it has ended before."""
    listener.settimeout(1.0)
    while rank.is_alive():
        with suppress(TimeoutError):
            connection, _ = listener.accept()
            connection.settimeout(None)
            return connection.makefile("rw")
    raise ConnectionError


def _in_turn(ours: TextIO, theirs: tuple[TextIO, TextIO], num_steps: int) -> list:
    """Lets the two take a step each until all are done; what hacpo_mega says of its own. OSError when one is gone."""
    _wait(ours)
    _wait(theirs[0])
    for _ in range(num_steps):
        _say(ours, "go")
        _wait(ours)
        _say(theirs[1], "go")
        _wait(theirs[0])
    return json.loads(ours.readline())


def _say(line: TextIO, word: str) -> None:
    line.write(word + "\n")
    line.flush()


def _wait(line: TextIO) -> None:
    while (said := line.readline()) != "ready\n":
        if not said:
            raise ConnectionError


def row_name(cell: Cell, kind: str) -> tuple[str, ...]:
    """What a row of the table is of (table.GRID_WORK)."""
    size = SIZES[cell.size]
    widths = size.heads + size.kv_heads
    layer = size.hidden * (2 * widths * size.head_dim + 3 * size.ffn)
    total = size.layers * layer + cell.vocabulary * size.hidden
    num_answers = cell.num_prompts * G
    lengths = lengths_of(kind, num_answers, 0)
    tokens = f"{EQUAL}" if kind == "equal" else f"{sum(lengths) / num_answers:.0f}, at most {max(lengths)}"
    work = (str(cell.vocabulary), str(cell.prompt_tokens), str(num_answers), tokens, str(cell.num_updates))
    return (cell.size, f"{total / 1e6:.1f}M", *work)


def run(asked: argparse.Namespace, peer: dict[str, str]) -> str:
    """Measures what is missing; the table of all that was asked for."""
    from hacpo_mega.logbook.provenance import source_commit

    rows, commit = {}, source_commit() or "unknown"
    asked.out.mkdir(parents=True, exist_ok=True)
    for cell in cells(asked):
        file, made_with = asked.out / f"{cell.name}.json", {"commit": commit, "rounds": asked.rounds}
        found = json.loads(file.read_text()) if file.is_file() else {}
        if found.get("made with") != made_with:
            began = time.monotonic()
            with tempfile.TemporaryDirectory(prefix="hacpo_grid_") as work:
                turns = measure(cell, asked, peer, Path(work))
            parts = {kind: [[asdict(turn) for turn in side] for side in turns[kind]] for kind in LENGTHS}
            found = {"made with": made_with, **parts}
            file.write_text(json.dumps(found), encoding="utf-8")
            print(f"{cell.name}: {time.monotonic() - began:.0f} s", flush=True)
        for kind in LENGTHS:
            rows[row_name(cell, kind)] = tuple([Turn(**turn) for turn in side] for side in found[kind])
        (asked.out / "grid.md").write_text(grid_markdown(rows), encoding="utf-8")
    return grid_markdown(rows)


def main() -> None:
    """Measures, prints and writes the table. Exit 2 with a line for bad input, 1 when a trainer fails."""
    asked = arguments()
    # The user's, less PYTHONPATH: the folder `kernels` of this repository would shadow a package of theirs.
    peer = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {"HF_HUB_OFFLINE": "1"}
    prepare_environment()
    try:
        print("\n" + run(asked, peer))
    except ValueError as error:
        sys.exit(print(error, file=sys.stderr) or 2)
    except RuntimeError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
