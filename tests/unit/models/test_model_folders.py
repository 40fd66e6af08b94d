"""A model folder with something wrong in it: one line that names file, field or tensor, before anything is loaded."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import tomli_w
from hollow_models import write_hollow_safetensors
from job import run_here
from repository import ROOT
from run_cases import CHARACTERS
from safetensors import safe_open
from safetensors.numpy import load_file, save_file
from tiny_models import LLAMA3_ROPE, make_model

from hacpo_mega.config import load_config
from hacpo_mega.models.families.architecture import Architecture
from hacpo_mega.models.files.weight_files import read_header, stored_tensors
from hacpo_mega.models.sharding.segments import all_sources
from hacpo_mega.samples.tokenizers import make_tokenizer

ONE_FILE, INDEX = "model.safetensors", "model.safetensors.index.json"
NORM = "model.norm.weight"


@pytest.fixture(scope="module")
def original(tmp_path_factory) -> Path:
    """A sound folder in several files, which no test writes to."""
    folder = make_model(tmp_path_factory.mktemp("sound") / "model", "qwen3", head_dim=32, max_shard_size="60KB")
    make_tokenizer(folder, CHARACTERS)
    return folder


@pytest.fixture(scope="module")
def original_in_one(tmp_path_factory) -> Path:
    folder = make_model(tmp_path_factory.mktemp("one") / "model", "qwen3", head_dim=32, num_layers=1)
    make_tokenizer(folder, CHARACTERS)
    return folder


@pytest.fixture
def folder(tmp_path, original) -> Path:
    """A copy in several files, the test's own."""
    return Path(shutil.copytree(original, tmp_path / "model"))


@pytest.fixture
def one_file(tmp_path, original_in_one) -> Path:
    """A copy in one file, the test's own."""
    return Path(shutil.copytree(original_in_one, tmp_path / "model"))


def run_file(folder: Path, **agent: object) -> Path:
    tables = {
        "run_dir": str(folder.parent / "run"),
        "num_steps": 1,
        "data": {"generator": "arithmetic"},
        "reward": {"kind": "arithmetic"},
        "rollout": {"max_prompt_tokens": 8, "max_answer_tokens": 8},
        "training": {"prompts_per_step": 4, "prompts_per_update": 4, "max_tokens_per_microbatch": 64},
        "agents": [{"name": "one", "model": str(folder), **agent}],
    }
    file = folder.parent / "run.toml"
    file.write_text(tomli_w.dumps(tables))
    return file


def complaints(folder: Path, **agent: object) -> list[str]:
    """The lines of `hacpo-mega check`, without what they all begin with."""
    file = run_file(folder, **agent)
    with pytest.raises(ValueError, match=r"agents\.one: ") as error:
        load_config(file)
    return [line.removeprefix(f"{file}: agents.one: ") for line in str(error.value).splitlines()]


def edit_config(folder: Path, **changes: object) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    return path


# ---- config.json


@pytest.mark.parametrize(
    "changes, problem",
    [
        ({"architectures": ["BloomForCausalLM"]}, "architecture BloomForCausalLM is not supported"),
        ({"architectures": None}, "architecture none given is not supported"),
        ({"model_type": "bloom"}, "model_type 'bloom' is not supported"),
        ({"model_type": "llama"}, "model_type 'llama' goes with architecture LlamaForCausalLM, found Qwen3ForCausalLM"),
        ({"num_attention_heads": "two"}, "num_attention_heads must be an integer of at least 1, found 'two'"),
        ({"num_attention_heads": 0}, "num_attention_heads must be an integer of at least 1, found 0"),
        ({"num_hidden_layers": -2}, "num_hidden_layers must be an integer of at least 1, found -2"),
        ({"hidden_size": 64.0}, "hidden_size must be an integer of at least 1, found 64.0"),
        ({"vocab_size": True}, "vocab_size must be an integer of at least 1, found True"),
        ({"intermediate_size": None}, "the field 'intermediate_size' is missing"),
        ({"num_key_value_heads": 3}, "4 attention heads cannot share 3 key/value heads evenly"),
        ({"head_dim": 31}, "head_dim 31 is odd"),
        ({"rms_norm_eps": -1.0}, "rms_norm_eps must be a number above 0, found -1.0"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings must be true or false, found 'yes'"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu' is not supported, only 'silu'"),
        ({"use_sliding_window": True}, "use_sliding_window = True is not supported, only False"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types has 'sliding_attention'"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "the field 'factor' is missing"),
        ({"rope_parameters": {**LLAMA3_ROPE, "factor": "4"}}, "factor must be a number above 0, found '4'"),
        ({"rope_parameters": {"rope_type": "dynamic"}}, "rope type 'dynamic' is not supported with qwen3"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor = 0.5 is not supported"),
        ({"rope_parameters": [1]}, "rope_parameters must be an object, found [1]"),
        ({"quantization_config": {"bits": 4}}, "quantization_config = {'bits': 4} is not supported, only None"),
        # Megatron adds the bias that vLLM leaves out: their log-probs are nats apart.
        ({"attention_bias": True}, "attention_bias = True is not supported with qwen3: vLLM leaves out the bias"),
    ],
)
def test_a_config_json_that_says_something_else_is_one_line(folder, changes, problem):
    path = edit_config(folder, **changes)
    (line,) = complaints(folder)
    assert line.startswith(f"{path}: {problem}")


@pytest.mark.parametrize(
    "text, problem",
    [
        (b"[]", "must hold a JSON object, found a list"),
        (b"{", "not valid JSON: "),
        (b"\xff\xfe", "not valid JSON: "),
    ],
)
def test_a_config_json_that_is_none_is_one_line(folder, text, problem):
    (folder / "config.json").write_bytes(text)
    (line,) = complaints(folder)
    assert line.startswith(f"{folder / 'config.json'}: {problem}")


def test_a_folder_without_config_json_and_without_a_tokenizer(folder):
    (folder / "tokenizer.json").unlink()
    assert complaints(folder) == [
        f"model folder {folder} has no tokenizer (one of tokenizer.json, tokenizer.model, vocab.json, vocab.txt, "
        "spiece.model, tekken.json); copy it from the original"
    ]
    (folder / "config.json").unlink()
    (line,) = complaints(folder)
    assert line.startswith(f"model folder {folder} has no config.json")


# ---- tensors, by their headers


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-4])


def change(edit: Callable[[dict[str, np.ndarray]], object]) -> Callable[[Path], None]:
    def write(file: Path) -> None:
        tensors = load_file(file)
        edit(tensors)
        save_file(tensors, file)

    return write


@pytest.mark.parametrize(
    "damage, problem",
    [
        (cut, "{file} is no whole safetensors file (Error while deserializing header: incomplete metadata"),
        (lambda file: file.write_bytes(b""), "{file} is no whole safetensors file ("),
        (lambda file: file.write_bytes(b"\x08" + bytes(7) + b"not json"), "{file} is no whole safetensors file ("),
        (lambda file: file.write_bytes(b"\xff" * 64), "{file} is no whole safetensors file ("),
        (change(lambda t: t.pop(NORM)), f"{{folder}} lacks 1 tensors of this qwen3 model: {NORM}"),
        (change(lambda t: t.update(x=np.zeros(2, "f4"))), "{folder} has 1 tensors unknown to qwen3: x"),
        (
            change(lambda t: t.update({NORM: np.zeros(65, "f4")})),
            f"{{file}}: {NORM} has shape (65,); config.json says (64,)",
        ),
        (change(lambda t: t.update({NORM: np.zeros(64, "i4")})), f"{{file}}: {NORM} is stored as I32; expected one of"),
    ],
    ids=["truncated", "empty", "no JSON", "no length", "missing", "unknown", "misshapen", "integers"],
)
def test_a_file_that_is_not_the_models_is_one_line(one_file, damage, problem):
    file = one_file / ONE_FILE
    whole = file.stat().st_size
    damage(file)
    (line,) = complaints(one_file)
    assert line.startswith(problem.format(file=file, folder=one_file, size=whole - 4, whole=whole))


def test_every_broken_file_of_an_index_is_named(folder):
    first, second, third, *_ = sorted(folder.glob("model-*.safetensors"))
    first.unlink()
    cut(second)
    moved = load_file(third)
    lost = sorted(moved)[0]
    moved.pop(lost)
    save_file(moved, third)
    found = complaints(folder)
    assert len(found) == 3
    assert found[0].startswith(f"{first} does not exist, but {INDEX} names it")
    assert found[1].startswith(f"{second} is no whole safetensors file")
    assert found[2] == f"{third} lacks 1 tensors that {INDEX} looks for there: {lost}"


def test_an_index_that_leads_out_of_the_folder_is_refused(folder):
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"][NORM] = "../elsewhere.safetensors"
    (folder / INDEX).write_text(json.dumps(index))
    assert complaints(folder) == [f"{folder / INDEX}: weight_map must name a file for every tensor"]


def test_headers_are_read_as_safetensors_reads_them(original, tmp_path):
    for file in original.glob("*.safetensors"):
        with safe_open(file, framework="np") as tensors:
            expected = {name: tuple(tensors.get_slice(name).get_shape()) for name in tensors.keys()}  # noqa: SIM118
        assert {name: stored.shape for name, stored in read_header(file).items()} == expected
    wanted = {source.name: source.shape for source in all_sources(Architecture.from_folder(original))}
    assert {name: stored.shape for name, stored in stored_tensors(original).items()} == wanted
    write_hollow_safetensors(tmp_path / "hollow.safetensors", wanted)
    with safe_open(tmp_path / "hollow.safetensors", framework="np") as tensors:
        assert set(tensors.keys()) == set(wanted)


# ---- weights that readers would take differently


HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


def stale_copy(folder: Path) -> None:
    """A second file has zeros under a name that the index places in the first."""
    first, second, *_ = sorted(folder.glob("model-*.safetensors"))
    change(lambda t: t.update({name: np.zeros_like(x) for name, x in load_file(first).items()}))(second)


def unnamed_tensor(folder: Path) -> None:
    change(lambda t: t.update({"model.layers.9.stray": np.zeros(2, "f4")}))(min(folder.glob("model-*.safetensors")))


def single_beside(folder: Path) -> None:
    save_file({NORM: np.zeros(64, "f4")}, folder / ONE_FILE)


def shard_of_another_save(folder: Path) -> None:
    save_file({NORM: np.zeros(64, "f4")}, folder / "model-00009-of-00009.safetensors")


def adapter(folder: Path) -> None:
    (folder / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "org/base"}))


def adapter_weights(folder: Path) -> None:
    save_file({"a": np.zeros(2, "f4")}, folder / "adapter_model.safetensors")


@pytest.mark.parametrize(
    "spoil, problem",
    [
        (stale_copy, f"tensors that {INDEX} places in another file: "),
        (unnamed_tensor, f"holds 1 tensors that {INDEX} does not name: model.layers.9.stray"),
        (single_beside, f"holds {ONE_FILE} beside {INDEX}, which does not name it"),
        (shard_of_another_save, f"holds model-00009-of-00009.safetensors, which {INDEX} does not name"),
        (adapter, "holds adapter_config.json beside whole weights: transformers with peft puts the adapter on top"),
        (adapter_weights, "holds adapter_model.safetensors beside whole weights"),
    ],
)
def test_a_folder_of_shards_that_is_read_in_two_ways_is_one_line(folder, spoil, problem):
    spoil(folder)
    (line,) = complaints(folder)
    assert problem in line


def test_what_every_reader_passes_over_is_no_problem(folder):
    """Mistral's second format, pickles, a buffer that the index does not name, a hidden file of another system."""
    (folder / "._model-00001-of-00003.safetensors").write_bytes(b"x")
    save_file({"layers.0.wq": np.zeros(2, "f4")}, folder / "consolidated.safetensors")
    (folder / "params.json").write_text("{}")
    (folder / "pytorch_model.bin").write_bytes(b"x")
    buffer = {"model.layers.0.self_attn.rotary_emb.inv_freq": np.zeros(2, "f4")}
    change(lambda t: t.update(buffer))(min(folder.glob("model-*.safetensors")))
    load_config(run_file(folder))


def test_an_index_of_a_single_file_is_no_problem(one_file):
    index = {"weight_map": dict.fromkeys(load_file(one_file / ONE_FILE), ONE_FILE)}
    (one_file / INDEX).write_text(json.dumps(index))
    load_config(run_file(one_file))


def test_an_index_without_names_is_refused(one_file):
    """vLLM reads the index wherever there is one."""
    (one_file / INDEX).write_text("{}")
    assert complaints(one_file) == [f"{one_file / INDEX}: weight_map must name a file for every tensor"]


def test_files_that_vllm_would_load_beside_a_single_one_are_refused(one_file):
    save_file({"layers.0.wq": np.zeros(2, "f4")}, one_file / "consolidated.safetensors")
    (line,) = complaints(one_file)
    assert line.startswith(f"{one_file} holds consolidated.safetensors beside {ONE_FILE}, without {INDEX}: vLLM loads")


def test_a_tied_head_must_be_the_embedding_to_the_last_byte(one_file):
    file = one_file / ONE_FILE
    change(lambda t: t.update({HEAD: t[EMBEDDING].copy()}))(file)
    load_config(run_file(one_file))

    def last_number(tensors: dict[str, np.ndarray]) -> None:
        tensors[HEAD][-1, -1] = np.nextafter(tensors[HEAD][-1, -1], np.float32(9.0))

    change(last_number)(file)
    (line,) = complaints(one_file)
    assert line.startswith(f"{file}: {HEAD} differs from {EMBEDDING}, and tie_word_embeddings of config.json says")
    edit_config(one_file, tie_word_embeddings=False)
    load_config(run_file(one_file))


@pytest.mark.parametrize("spoil", [stale_copy, single_beside, "head", adapter])
def test_check_train_doctor_and_eval_refuse_it_alike(folder, tmp_path, spoil):
    if spoil == "head":
        *_, last = sorted(folder.glob("model-*.safetensors"))
        change(lambda t: t.update({HEAD: np.ones((131, 64), "f4")}))(last)
        index = json.loads((folder / INDEX).read_text())
        index["weight_map"][HEAD] = last.name
        (folder / INDEX).write_text(json.dumps(index))
    else:
        spoil(folder)
    file, problems = run_file(folder), tmp_path / "b.jsonl"
    problems.write_text('{"prompt": "1+1=", "answer": "2"}\n')
    said = [run_here(command, file) for command in ("check", "train", "doctor")]
    said.append(run_here("eval", folder, problems, "--out", tmp_path / "out", "reward.kind=arithmetic"))
    assert [done.returncode for done in said] == [2, 2, 2, 2]
    assert {done.stderr.removeprefix(f"{file}: agents.one: ") for done in said} == {said[-1].stderr}
    assert str(folder) in said[-1].stderr and said[-1].stderr.count("\n") == 1


def test_an_adapter_without_its_base_names_the_base(one_file):
    adapter(one_file)
    (one_file / ONE_FILE).rename(one_file / "adapter_model.safetensors")
    (line,) = complaints(one_file)
    assert "holds adapter_config.json, adapter_model.safetensors of org/base and no whole weights; merge it" in line
    (one_file / "config.json").unlink()
    (line,) = complaints(one_file)
    assert line.startswith(f"model folder {one_file} holds an adapter of org/base and no config.json; merge it into")


# ---- pass-through tables


@pytest.mark.parametrize(
    "tables, problem",
    [
        ({"megatron": {"bias_dropout_fusio": True}}, "remove it; did you mean 'bias_dropout_fusion'?"),
        ({"megatron": {"moe_ffn_hidden_size": "1"}}, "megatron.moe_ffn_hidden_size: no field of Megatron's that has"),
        ({"megatron": {"num_layers_in_first_pipeline_stage": 1.5}}, "must be a whole number from 0, found 1.5"),
        ({"megatron": {"recompute_granularity": "full"}}, "from the model folder and the agent's recompute; remove it"),
        ({"megatron": {"cp_comm_type": "zz"}}, "megatron.cp_comm_type: no field of Megatron's that has an effect"),
        ({"megatron": {"moe_z_loss_coeff": 0.1}}, "megatron.moe_z_loss_coeff has no effect here: this "),
        ({"megatron": {"deterministic_mode": 1}}, "megatron.deterministic_mode must be true or false, found 1"),
        ({"megatron": {"context_parallel_size": 2}}, "megatron.context_parallel_size is decided by this project"),
        ({"megatron": {"virtual_pipeline_model_parallel_size": 2}}, "needs pp >= 3, found 1"),
        ({"megatron": {"normalization": "LayerNorm"}}, "megatron.normalization is decided by this project"),
        ({"megatron": {"params_dtype": "bf16"}}, "megatron.params_dtype is decided by this project"),
        ({"vllm": {"max_num_seq": 4}}, "vLLM's EngineArgs has no such field; did you mean 'max_num_seqs'?"),
        ({"vllm": {"gpu_memory_utilization": "half"}}, "must be a number above 0, at most 1, found 'half'"),
        ({"vllm": {"kv_cache_dtype": 8}}, "vllm.kv_cache_dtype must be text, found 8"),
        ({"vllm": {"max_num_seqs": True}}, "vllm.max_num_seqs must be a whole number from 1, found True"),
        ({"vllm": {"tensor_parallel_size": 2}}, "vllm.tensor_parallel_size is decided by this project"),
        ({"vllm": {"hf_overrides": {"rope_theta": 1.0}}}, "vllm.hf_overrides is decided by this project"),
    ],
)
def test_a_field_that_cannot_be_passed_on_is_one_line(original, tmp_path, tables, problem):
    folder = Path(shutil.copytree(original, tmp_path / "model"))
    (line,) = complaints(folder, **tables)
    assert problem in line


def test_what_can_be_passed_on_is_accepted(folder):
    megatron = {"bias_dropout_fusion": True, "deterministic_mode": True}
    vllm = {"gpu_memory_utilization": 1, "enforce_eager": False, "max_num_seqs": 8, "kv_cache_dtype": "auto"}
    vllm |= {"compilation_config": {"level": 0}, "block_size": 16}
    load_config(run_file(folder, megatron=megatron, vllm=vllm))


def test_check_prints_the_lines_and_exits_with_2(one_file):
    file = run_file(one_file, tp=8, vllm={"max_num_seq": 4})
    cut(one_file / ONE_FILE)
    command = [sys.executable, "-m", "hacpo_mega.cli", "check", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    lines = done.stderr.splitlines()
    assert done.returncode == 2
    assert len(lines) == 3  # of an engine over the same ranks nothing is said beside tp, with another advice
    assert all(line.startswith(f"{file}: agents.one: ") for line in lines)
    assert [word for word in ("max_num_seq:", "tp (8)", "no whole safetensors file") if word not in done.stderr] == []
