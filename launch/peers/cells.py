"""The models of the grid beside TRL, what a step of each is, and on which processes hacpo_mega takes it."""

import json
import math
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from bench import WARM_UP

from hacpo_mega.config import InitConfig

if TYPE_CHECKING:
    from hacpo_lab.throughput.workload import Workload

G = 8
LONGEST, EQUAL = 48, 24
LENGTHS = ("equal", "tail")
TAIL = statistics.NormalDist(3.0, 0.5)  # of the logarithm of tokens: mean 22
LARGE = 100e6  # parameters: memory does not hold trainers of every layout side by side


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
        """The name of the cell's file."""
        return f"{self.size}_v{self.vocabulary}_p{self.prompt_tokens}"

    @property
    def num_prompts(self) -> int:
        """Prompts of a step."""
        return SIZES[self.size].prompts[self.prompt_tokens][0]

    @property
    def num_updates(self) -> int:
        """Updates of a step."""
        return SIZES[self.size].prompts[self.prompt_tokens][1]


def num_parameters(cell: Cell) -> int:
    """Without norms."""
    size = SIZES[cell.size]
    layer = size.hidden * (2 * (size.heads + size.kv_heads) * size.head_dim + 3 * size.ffn)
    return size.layers * layer + cell.vocabulary * size.hidden


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
    """The work of both trainers; the warm-up is of the longest."""
    from hacpo_lab.throughput.workload import Workload

    steps = []
    for number, kind in enumerate([LENGTHS[-1]] * WARM_UP + [*kinds]):
        lengths = lengths_of(kind, cell.num_prompts * G, number)
        groups = (lengths[start : start + G] for start in range(0, len(lengths), G))
        answers = (tuple((tokens, float(g % 2)) for g, tokens in enumerate(group)) for group in groups)
        steps.append({(cell.size, prompt): group for prompt, group in enumerate(answers)})
    return Workload(LONGEST, tuple(steps))


@dataclass(frozen=True)
class Layout:
    """Processes of hacpo_mega."""

    lanes: int = 1
    tp: int = 1


def layouts_of(cell: Cell, cores: int) -> dict[str, Layout]:
    """One process that has all cores, and one a core, as far as prompts and heads are shared evenly."""
    lanes = math.gcd(cores, cell.num_prompts // cell.num_updates)
    tp = math.gcd(cores, SIZES[cell.size].kv_heads)
    found = {"1": Layout()}
    if lanes > 1 and num_parameters(cell) < LARGE:
        found[f"lanes {lanes}"] = Layout(lanes=lanes)
    if tp > 1:
        found[f"tp {tp}"] = Layout(tp=tp)
    return found


def with_layout(file: Path, name: str, layout: Layout) -> Path:
    """A configuration of so many processes beside that of one."""
    changed = file.with_name(f"{name}.toml")
    text = file.read_text(encoding="utf-8").replace(f"{file.parent}/run", f"{file.parent}/run {name}")
    text = text.replace("agents = [{", f"agents = [{{ tp = {layout.tp},")
    changed.write_text(f"lanes = {layout.lanes}\n{text}", encoding="utf-8")
    return changed
