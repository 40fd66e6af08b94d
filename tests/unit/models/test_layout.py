"""Layouts that a model can have: `hacpo-mega check` and the model builder against Megatron itself.

The oracle of the random cases is Megatron: without our rules, the real model of every pipeline stage is built, on
torch's fake process group of the right size, and what was built is counted. Nothing of ours decides what is right.
"""

import dataclasses
import json
import random
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import pytest
import torch
import torch.distributed as dist
from hollow_models import write_hollow_weights, write_smallest_tokenizer
from megatron.core import parallel_state
from megatron.core.transformer import TransformerConfig
from pydantic import BaseModel, Field
from torch.testing._internal.distributed.fake_pg import FakeStore

from hacpo_mega.config import load_config
from hacpo_mega.config.checks.pass_through import DECIDED_VLLM, engine_fields, require_accepted, table_problems
from hacpo_mega.megatron.actor import initialize_parallel
from hacpo_mega.megatron.model.model import build_model, stage_model, transformer_config
from hacpo_mega.models.families.architecture import Architecture
from hacpo_mega.models.sharding.layout import FIRST_STAGE, LAST_STAGE, VIRTUAL, Layout, layout_problems
from hacpo_mega.models.sharding.megatron_fields import (
    BALANCING,
    DECIDED,
    FREE,
    WITH_CHUNKS,
    WITH_EXPERTS,
    WITH_PIPELINE,
    WITH_TENSOR_RANKS,
    WORKS,
    field_problems,
)
from hacpo_mega.models.sharding.segments import shard_shape, stage_slots

NUM_CASES = 500
FAMILIES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}


@dataclass(frozen=True)
class Case:
    """A config.json, a layout and the tokens of the longest prompt with its answer."""

    config: tuple[tuple[str, object], ...]
    tp: int
    pp: int
    uneven: tuple[tuple[str, int], ...]
    num_tokens: int


def random_case(rng: random.Random) -> Case:
    """Sizes that fit often enough, and break every rule alone often enough (LINES)."""
    family = rng.choice(list(FAMILIES))
    kv_heads = rng.choice([1, 1, 2, 2, 3, 4])
    heads, head_dim = kv_heads * rng.choice([1, 2, 3, 3, 4]), rng.choice([32, 64, 96])
    config = {
        "architectures": [FAMILIES[family]],
        "model_type": family,
        "num_hidden_layers": rng.choice([2, 3, 4, 5, 6]),
        "hidden_size": heads * head_dim if family == "qwen2" else 32,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "intermediate_size": rng.choice([12, 24, 60, 40, 64]),
        "vocab_size": rng.choice([7, 150]),
        "max_position_embeddings": rng.choice([32, 64]),
        "tie_word_embeddings": rng.random() < 0.5,
    }
    keys = rng.choice([*[()] * 4, (FIRST_STAGE,), (LAST_STAGE,), (FIRST_STAGE, LAST_STAGE)])
    return Case(
        config=tuple(config.items()),
        tp=rng.choice([1, 2, 3, 3, 4, 6]),
        pp=rng.choice([1, 1, 1, 2, 2, 3, 4]),
        uneven=tuple((key, rng.choice([0, 1, 1, 2, 3])) for key in keys),
        num_tokens=rng.choice([31, 32, 32, 32, 33]),
    )


@pytest.fixture(scope="module")
def cases() -> list[Case]:
    rng = random.Random(5)
    # By layout, so that a fake world serves all of its cases.
    return sorted((random_case(rng) for _ in range(NUM_CASES)), key=lambda case: (case.tp, case.pp))


@pytest.fixture
def folder_of(tmp_path) -> Callable[[Case], Path]:
    def make(case: Case) -> Path:
        folder = tmp_path / "model"
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_text(json.dumps(dict(case.config)))
        write_smallest_tokenizer(folder)
        write_hollow_weights(folder, Architecture.from_folder(folder))
        return folder

    return make


# A phrase of each rule. In some cases each rule must be the only one broken: else it could be missing, unnoticed.
LINES = (
    "attention heads. ",
    "feed-forward columns. ",
    "rows of query, key and value together. ",
    "key/value heads or be a multiple",
    "layers, unless megatron.",
    "is more than the model's",
    "other stages (pp = ",
    "the only stage has all",
    "is beyond the",
)


def complaints_of_check(case: Case, folder: Path) -> list[str]:
    """Through the front door: a TOML file."""
    megatron = ", ".join(f"{key} = {layers}" for key, layers in case.uneven)
    file = folder.parent / "run.toml"
    file.write_text(
        f"""
run_dir = "{folder.parent}/run"
num_steps = 1
data = {{ generator = "arithmetic" }}
reward = {{ kind = "arithmetic" }}
rollout = {{ max_prompt_tokens = 8, max_answer_tokens = 4 }}
evaluation = {{ max_answer_tokens = {case.num_tokens - 8} }}
training = {{ prompts_per_step = 4, prompts_per_update = 4, max_tokens_per_microbatch = 960 }}
[[agents]]
name = "one"
model = "{folder}"
tp = {case.tp}
pp = {case.pp}
engine_tp = 1
megatron = {{ {megatron} }}
"""
    )
    try:
        load_config(file)
    except ValueError as error:
        problems = str(error).splitlines()
    else:
        return []
    assert all("agents.one: " in line for line in problems), problems
    return problems


class FakeWorld:
    """This process as any rank of a cell: Megatron's groups over torch's fake backend, which sends nothing."""

    def __init__(self) -> None:
        self.place: tuple[int, int, int] | None = None

    def enter(self, tp: int, pp: int, rank: int) -> None:
        if self.place == (tp, pp, rank):
            return
        self.leave()
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=tp * pp)
        initialize_parallel(tp, pp, seed=1)
        self.place = tp, pp, rank

    def leave(self) -> None:
        if self.place is not None:
            parallel_state.destroy_model_parallel()
            dist.destroy_process_group()
            self.place = None


@pytest.fixture
def world():
    world = FakeWorld()
    yield world
    world.leave()


def accepted_by_builder(case: Case, architecture: Architecture) -> bool:
    """Through the front door of the model builder, on whatever rank this is."""
    try:
        build_model(
            architecture,
            tp=case.tp,
            pp=case.pp,
            dtype=torch.float32,
            max_positions=case.num_tokens,
            overrides=dict(case.uneven),
        )
    except ValueError:
        return False
    return True


def megatron_builds_it(case: Case, architecture: Architecture, world: FakeWorld) -> bool:
    """Megatron makes every stage without an error, and the stages hold every layer once and none is empty."""
    numbers: list[int] = []
    for pp_rank in range(case.pp):
        for tp_rank in {0, case.tp - 1}:
            world.enter(case.tp, case.pp, pp_rank * case.tp + tp_rank)
            try:
                layout = Layout.of(case.tp, case.pp, dict(case.uneven))
                config = transformer_config(architecture, layout, dtype=torch.float32, overrides=dict(case.uneven))
                model = stage_model(architecture, config, max_positions=case.num_tokens)
            except (AssertionError, ValueError, RuntimeError):
                return False
            for slot in stage_slots(architecture, model.chunks, pp_rank):
                parameter = model.get_parameter(slot.parameter)
                assert shard_shape(slot, architecture, tp=case.tp) == parameter.shape, (slot, case)
        numbers += [layer.layer_number for layer in model.decoder.layers] or [0]
    return numbers == list(range(1, architecture.num_layers + 1))


@pytest.mark.nightly
def test_check_and_the_builder_accept_what_megatron_builds(cases, folder_of, world):
    accepted, disagreements, alone = 0, [], dict.fromkeys(LINES, 0)
    for case in cases:
        folder = folder_of(case)
        architecture = Architecture.from_folder(folder)
        problems = complaints_of_check(case, folder)
        if len(problems) == 1:
            (rule,) = [rule for rule in LINES if rule in problems[0]]
            alone[rule] += 1
        world.enter(case.tp, case.pp, 0)
        builds = accepted_by_builder(case, architecture)
        fits = case.num_tokens <= dict(case.config)["max_position_embeddings"]
        truth = fits and megatron_builds_it(case, architecture, world)
        accepted += truth
        if not (not problems) == builds == truth:
            disagreements.append((problems, builds, truth, case))
    assert disagreements == []
    assert accepted >= NUM_CASES // 10, accepted
    assert min(alone.values()) >= 2, alone


def test_the_fields_that_check_knows_are_megatrons():
    """By name and type, against the class itself; vLLM's by name, from its source."""
    known = {field.name: field for field in dataclasses.fields(TransformerConfig)}
    assert known.keys() >= DECIDED
    assert engine_fields() >= DECIDED_VLLM
    plain = {n: f.default for n, f in known.items() if n in FREE and type(f.default) in (bool, int, float, str)}
    assert len(plain) > 10
    assert list(table_problems(plain, {})) == []
    for name, default in plain.items():
        (line,) = table_problems({name: "x" if type(default) is bool else True}, {})
        assert line.startswith(f"megatron.{name} must be ") or name == BALANCING


def test_every_field_of_megatron_has_one_place():
    """Another number is of another version: see whether a field that has come works in this project."""
    known = {field.name for field in dataclasses.fields(TransformerConfig)}
    places = [DECIDED, WORKS, WITH_PIPELINE, WITH_CHUNKS, WITH_TENSOR_RANKS, WITH_EXPERTS]
    named = [field for place in places for field in place]
    assert len(named) == len(set(named)) and set(named) <= known, set(named) - known
    assert len(known) == 306


def test_a_field_without_effect_is_refused_by_name():
    defaults = {field.name: field.default for field in dataclasses.fields(TransformerConfig)}
    for name in defaults.keys() - DECIDED - FREE:
        value = defaults[name] if type(defaults[name]) in (bool, int, float, str) else 1
        (line,) = table_problems({name: value}, {})
        assert line.startswith(f"megatron.{name}: no field of Megatron's that has an effect here")
    (line,) = table_problems({BALANCING: "seq_aux_loss"}, {})
    assert line == (
        f"megatron.{BALANCING}: 'seq_aux_loss' is not built: a loss over each micro-batch is. Nearest: 'aux_loss'"
    )
    (line,) = table_problems({"moe_aux_loss_coeff": [0.1, 0.2]}, {})
    assert line == "megatron.moe_aux_loss_coeff: needs one number, found [0.1, 0.2]"
    (line,) = table_problems({"moe_aux_loss_coeff": "1"}, {})
    assert line == "megatron.moe_aux_loss_coeff must be a number from 0, below inf, found '1'"
    (line,) = table_problems({FIRST_STAGE: -1}, {})
    assert line == f"megatron.{FIRST_STAGE} must be a whole number from 0, found -1"


Mode = Literal["auto", "fp8"]


@pytest.mark.parametrize(
    ("key", "value", "complaint"),
    [
        ("max_num_seqs", True, "agents.a.vllm.max_num_seqs must be int, found True"),
        ("max_num_seqs", "4", "agents.a.vllm.max_num_seqs must be int, found '4'"),
        ("max_num_seqs", 0, "agents.a.vllm.max_num_seqs: input should be greater than or equal to 1, found 0"),
        ("max_num_seq", 4, "EngineArgs has no such field; did you mean 'max_num_seqs'?"),
        ("seed", 4, "this key is decided by the project"),
        ("kv_cache_dtype", "fp9", "agents.a.vllm.kv_cache_dtype: input should be 'auto' or 'fp8', found 'fp9'"),
        ("watermark", 1, None),
        ("kv_cache_dtype", "fp8", None),
        ("late", {"x": 1}, None),
    ],
)
def test_an_engine_argument_is_checked_by_types_and_bounds_of_its_class(key, value, complaint):
    class Table(BaseModel):
        max_num_seqs: int = Field(ge=1)

    types = {"max_num_seqs": int | None, "watermark": float, "kv_cache_dtype": Mode, "late": "A | B", "seed": int}
    if complaint is None:
        return require_accepted({key: value}, types, [Table.__pydantic_fields__], "agents.a.")
    with pytest.raises(ValueError, match=re.escape(complaint)) as found:
        require_accepted({key: value}, types, [Table.__pydantic_fields__], "agents.a.")
    assert "\n" not in str(found.value)


def test_a_field_works_where_its_model_and_layout_have_what_it_is_for():
    sparse = dataclasses.replace(QWEN, family="qwen3_moe", num_experts=4, experts_per_token=2, expert_ffn=64)
    for given, layout, why in (
        ({"batch_p2p_comm": False}, Layout(), "pp is 1"),
        ({"deallocate_pipeline_outputs": True}, Layout(pp=2), None),
        ({"overlap_p2p_comm": True}, Layout(pp=3), f"there is no {VIRTUAL}"),
        ({"clone_scatter_output_in_embedding": False}, Layout(), "tp is 1"),
        ({"clone_scatter_output_in_embedding": False}, Layout(tp=2), None),
        ({"moe_aux_loss_coeff": 0.5}, Layout(), "this qwen3 model has no experts"),
        ({"deterministic_mode": True}, Layout(), None),
    ):
        expected = [] if why is None else [f"megatron.{next(iter(given))} has no effect here: {why}; remove it"]
        assert list(field_problems(given, QWEN, layout)) == expected
    both = {"moe_aux_loss_coeff": 0.5, BALANCING: "aux_loss"}
    assert list(field_problems(both, sparse, Layout())) == []
    assert list(field_problems(both, sparse, Layout(), has_adapters=True)) == [
        "megatron.moe_aux_loss_coeff has no effect here: adapters leave the router as it is; remove it"
    ]
    assert list(field_problems({BALANCING: "aux_loss"}, sparse, Layout())) == [
        f"megatron.{BALANCING} has no effect here: moe_aux_loss_coeff is not given; remove it"
    ]


def test_every_decided_field_is_refused():
    lines = list(table_problems(dict.fromkeys(DECIDED, 1), dict.fromkeys(DECIDED_VLLM, 1)))
    assert len(lines) == len(DECIDED) + len(DECIDED_VLLM)
    assert all("is decided by this project" in line for line in lines)


QWEN = Architecture(
    family="qwen3", num_layers=6, hidden_size=64, num_heads=12, num_kv_heads=2, head_dim=32, ffn_size=96,
    vocab_size=131, max_positions=64, norm_eps=1e-6, rope_theta=1e4, rope=None, tied=True, qkv_bias=False,
    output_bias=False, qk_norm=True,
)  # fmt: skip


@pytest.mark.parametrize(
    "layout, problem",
    [
        (Layout(tp=5), "tp (5) must divide the model's 12 attention heads. Nearest: tp = 4"),
        (Layout(pp=4), "pp (4) must divide the model's 6 layers, unless megatron.num_layers_in_first_pipeline_stage"),
        (Layout(pp=7), "pp (7) is more than the model's 6 layers. Nearest: pp = 6"),
        # (12 + 2 * 2) * 32 = 512 rows, which 12 ranks cannot share, though 12 heads and 96 columns they could
        (Layout(tp=12), "tp (12) must divide the model's 512 rows of query, key and value together. Nearest: tp = 4"),
        (Layout(pp=2, first_layers=6), "leaves 0 of the model's 6 layers to 1 other stages (pp = 2)"),
        (Layout(pp=4, first_layers=2), "Nearest: num_layers_in_first_pipeline_stage = 3"),
        (Layout(pp=3, first_layers=2, last_layers=5), "Nearest: num_layers_in_last_pipeline_stage = 3"),
        (Layout(first_layers=3), "with pp = 1 the only stage has all 6 layers; remove it"),
        (Layout(tp=4, engine_tp=3), "engine_tp (3) must divide the model's 2 key/value heads or be a multiple of them"),
        (Layout(tp=4, engine_tp=3), "engine_tp (3) must divide tp x pp (4 x 1 = 4). Nearest: engine_tp = 2"),
        (Layout(tp=2, cp=2, engine_tp=3), "engine_tp (3) must divide tp x cp x pp (2 x 2 x 1 = 4). Nearest: engine_tp"),
        (
            Layout(tp=2, cp=4),
            "cp (4): tp x cp (2 x 4 = 8) must divide the model's 12 attention heads, and its 2 key/value heads or be a "
            "multiple of them. Nearest: cp = 3",
        ),
        (Layout(cp=3), "and its 2 key/value heads or be a multiple of them. Nearest: cp = 2"),
    ],
)
def test_a_layout_that_does_not_fit_is_explained(layout, problem):
    assert any(problem in line for line in layout_problems(QWEN, layout)), layout_problems(QWEN, layout)


def test_heads_that_the_engines_attention_does_not_know_are_refused():
    sizes = [64, 80]
    assert layout_problems(QWEN, Layout(engine_tp=1), engine_head_sizes=sizes) == [
        "head_dim 32: vLLM's attention on CPU knows 64, 80. Nearest: 64"
    ]
    assert layout_problems(QWEN, Layout(), engine_head_sizes=sizes) == []


# Fields that advice sets, and the beginnings of the lines that it must end.
ADVICE = {
    "tp": ("tp", "tp ("),
    "pp": ("pp", "pp ("),
    "cp": ("cp", "cp ("),
    "engine_tp": ("engine_tp", "engine_tp ("),
    FIRST_STAGE: ("first_layers", "megatron."),
    LAST_STAGE: ("last_layers", "megatron."),
}


def test_every_nearest_value_is_valid():
    """A layout that follows the advice of a line no longer gets that line."""
    rng, taken = random.Random(3), dict.fromkeys(ADVICE, 0)
    for _ in range(2000):
        kv_heads = rng.choice([1, 2, 3, 4])
        sizes = {"num_kv_heads": kv_heads, "num_heads": kv_heads * rng.choice([1, 2, 3]), "head_dim": 8}
        architecture = replace(QWEN, num_layers=rng.randint(1, 7), ffn_size=rng.choice([12, 24, 60]), **sizes)
        first, last = (rng.choice([None, None, 0, 1, 2, 3]) for _ in range(2))
        tp, pp, cp = rng.randint(1, 9), rng.randint(1, 6), rng.randint(1, 5)
        layout = Layout(tp, pp, first, last, engine_tp=tp, cp=cp)
        for line in layout_problems(architecture, layout):
            if advice := re.search(r"Nearest: (\w+) = (\d+)", line):
                field, beginning = ADVICE[advice[1]]
                after = layout_problems(architecture, replace(layout, **{field: int(advice[2])}))
                assert [other for other in after if other.startswith(beginning)] == [], (layout, line)
                taken[advice[1]] += 1
    assert min(taken.values()) > 20, taken
