"""Tokenizers made here and real ones: round trips, longest match against a plain loop, answers behind a prompt."""

import copy
import inspect
import json
import re
import runpy
import shutil
from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
import tokenizers
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from repository import ROOT, SHARED
from run_cases import CHARACTERS
from transformers import AutoTokenizer, PreTrainedTokenizerFast
from view_cases import PAIRS

from hacpo_mega.config import AgentConfig, Prompting, RolloutConfig
from hacpo_mega.config.tables.schema import DataConfig, EvaluationConfig
from hacpo_mega.data.prompt_sets import held_out_prompts, training_sampler
from hacpo_mega.data.tasks import SKILLS
from hacpo_mega.megatron.weights.hf_writer import copy_beside_weights
from hacpo_mega.models.files.tokenizer_files import CLASS_TOKENS, token_problem
from hacpo_mega.samples.tokenizers import (
    TextCodec,
    agent_codecs,
    control_ids,
    load_tokenizer,
    longest_encodings,
    make_tokenizer,
    tokenizer_fingerprint,
)

REAL = SHARED / "tokenizers"
ALPHABET = [*sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()), "12", "<eos>"]
real = pytest.mark.skipif(not REAL.is_dir(), reason=f"real tokenizers are not in {REAL}")


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizers")
    return {name: make_tokenizer(folder / name, v) for name, v in (("chars", CHARACTERS), ("pairs", PAIRS))}


@pytest.fixture(scope="module")
def real_codecs():
    return {name: TextCodec(load_tokenizer(REAL / name)) for name in ("gpt-2", "phi-3", "deepseek-llm")}


@real
def test_kept_prompts_share_their_ids(real_codecs):
    """Thousands of prompts are kept, on every rank for every agent: with objects of their own they hold gigabytes."""
    kept = [i for n in range(300, 320) for i in real_codecs["gpt-2"].encode_prompt(f"Is {n} a prime number?")]
    assert max(kept) > 256 and len({id(i) for i in kept}) == len(set(kept))


def longest_match(text, vocabulary):
    tokens = []
    while text:
        tokens.append(max((t for t in vocabulary if text.startswith(t)), key=len))
        text = text[len(tokens[-1]) :]
    return tokens


@given(text=st.text(alphabet="".join(CHARACTERS), max_size=60))
@settings(max_examples=200)
def test_small_tokenizers_match_longest_first_and_come_back_exactly(small, text):
    for name, vocabulary in (("chars", CHARACTERS), ("pairs", PAIRS)):
        codec = TextCodec(small[name])
        ids = codec.encode_answer(text, ended=True)
        assert small[name].convert_ids_to_tokens(ids[:-1]) == longest_match(text, vocabulary)
        assert ids[-1] == codec.eos_id
        assert codec.decode_answer(ids) == text


def test_the_longest_match_spans_many_characters_and_regex_signs(tmp_path):
    vocabulary = ("a", "ab", "abc", "b", "c", ".", "|", "(", "\\", "^", "b|")
    codec = TextCodec(make_tokenizer(tmp_path, vocabulary))
    for text in ("abcab", "ab|c", "\\a.b", "((^"):
        ids = codec.encode_answer(text, ended=False)
        assert codec.tokenizer.convert_ids_to_tokens(ids) == longest_match(text, vocabulary)


def test_sizes_and_special_ids(small):
    assert (len(small["chars"]), len(small["pairs"])) == (19, 33)
    assert (small["pairs"].pad_token_id, small["pairs"].eos_token_id) == (0, 1)
    assert max(len(small["pairs"](e.answer).input_ids) for e in SKILLS["add"]()) <= 19


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "llama"])
def test_a_config_beside_it_does_not_change_the_tokenizer(tmp_path, small, family):
    """transformers replaces the pre-tokenizer of a folder whose config.json says qwen2; load_tokenizer must not."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": family}))
    made = make_tokenizer(tmp_path, PAIRS)
    assert tokenizer_fingerprint(made) == tokenizer_fingerprint(small["pairs"])
    assert len(load_tokenizer(tmp_path)("13+14=").input_ids) == 4


@pytest.mark.parametrize("named", ["LlamaTokenizerFast", "GPT2Tokenizer"])
@pytest.mark.parametrize("family", ["llama", "qwen3", "deepseek_v3"])
def test_a_class_that_reads_a_folder_wrongly_is_not_taken(tmp_path, family, named):
    """DeepSeek's models in the form of Llama and Qwen3 name Llama's, SmolLM2 GPT-2's; a copy names a right one."""
    folder, out, text = tmp_path / "model", tmp_path / "out", "12 + 34\nis  é"
    ids_of = {token: number for number, token in enumerate(ALPHABET)}
    made = tokenizers.Tokenizer(tokenizers.models.BPE(ids_of, [("1", "2")]))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Sequence(
        [tokenizers.pre_tokenizers.Digits(True), tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    made.decoder = tokenizers.decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=made, eos_token=ALPHABET[-1]).save_pretrained(folder)
    described = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(described | {"tokenizer_class": named}))
    (folder / "config.json").write_text(json.dumps({"model_type": family, "vocab_size": len(ALPHABET)}))
    codec = TextCodec(load_tokenizer(folder))
    ids = codec.encode_prompt(text)
    assert (len(ids), codec.decode_answer(ids)) == (len(text.encode()), text)
    out.mkdir()
    copy_beside_weights(folder, out, torch.float32)
    assert AutoTokenizer.from_pretrained(out)(text).input_ids == list(ids)
    assert tokenizer_fingerprint(load_tokenizer(out)) == codec.fingerprint
    assert token_problem(folder, len(ALPHABET)) is None  # no token of the class is added


def test_a_file_of_mistrals_own_format_beside_the_tokenizer_is_not_read(tmp_path, small):
    make_tokenizer(tmp_path, PAIRS)
    described = json.loads((tmp_path / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(described | {"tokenizer_class": "LlamaTokenizer"}))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mistral"}))
    (tmp_path / "tekken.json").write_text("{}")
    assert tokenizer_fingerprint(load_tokenizer(tmp_path)) == tokenizer_fingerprint(small["pairs"])


def test_other_tools_load_the_folder(small, tmp_path):
    small["pairs"].save_pretrained(tmp_path)
    assert AutoTokenizer.from_pretrained(tmp_path)("7+1=18").input_ids == small["pairs"]("7+1=18").input_ids


def test_characters_without_a_token_are_an_error(small):
    codec = TextCodec(small["chars"])
    with pytest.raises(ValueError, match="cannot encode '1\\+x'"):
        codec.encode_answer("1+x", ended=True)
    with pytest.raises(ValueError, match="has no tokens"):
        codec.encode_prompt("")
    for texts, found in ((["1+1", "1+x"], "cannot encode '1\\+x'"), (["1+1", ""], "has no tokens")):
        with pytest.raises(ValueError, match=found):
            codec.prompt_lengths(texts)
    assert codec.prompt_lengths([]) == codec.encode_answers([]) == []
    assert codec.encode_answers(["1+1", "1+x", ""]) == [codec.encode_answer("1+1", ended=False), None, ()]


@pytest.mark.parametrize(
    "vocabulary, found", [((), "none at all"), (("a", "b", "a"), r"repeated \['a'\]"), (("a", "", "<eos>"), "reserved")]
)
def test_impossible_vocabularies(tmp_path, vocabulary, found):
    with pytest.raises(ValueError, match=found):
        make_tokenizer(tmp_path, vocabulary)


def test_folders_without_a_tokenizer(tmp_path, small):
    with pytest.raises(ValueError, match="does not exist"):
        load_tokenizer(tmp_path / "absent")
    with pytest.raises(ValueError, match="no tokenizer could be loaded"):
        load_tokenizer(tmp_path)
    small["chars"].save_pretrained(tmp_path)
    described = json.loads((tmp_path / "tokenizer_config.json").read_text())
    del described["eos_token"]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(described))
    with pytest.raises(ValueError, match="names no eos_token"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"model"')
    with pytest.raises(ValueError, match="no tokenizer could be loaded"):
        load_tokenizer(tmp_path)


def test_which_tokens_are_no_text(small, tmp_path):
    """Special tokens, and added ones that look like it; words of a model's own, such as <think>, are text."""
    assert control_ids(small["chars"]) == {0, 1}
    tokenizer = make_tokenizer(tmp_path, CHARACTERS)
    named = ["</s>", "<|fim_prefix|>", "<\uff5cUser\uff5c>", "[PAD7]", "<unk>", "[MASK]"]
    tokenizer.add_tokens([*named, "<think>", "</think>", "\u00f8", "<tool_call>"])
    assert tokenizer.convert_ids_to_tokens(sorted(control_ids(tokenizer) - {0, 1})) == named
    codec = TextCodec(tokenizer)
    think = codec.encode_answer("<think>1</think>2", ended=False)
    assert len(think) == 4 and codec.shows(np.array(think)) and codec.decode_answer(think) == "<think>1</think>2"


def test_ids_that_are_no_tokens(small):
    codec = TextCodec(small["chars"])
    assert codec.shows(np.array([], dtype=np.int32)) and codec.shows(np.array([2, 18]))
    assert not any(codec.shows(np.array(ids)) for ids in ([2, 1], [2, 19], [99999]))


@real
def test_control_tokens_of_real_tokenizers(real_codecs):
    """Phi-3 has </s> among them though it is not marked special; a letter that DeepSeek added is a letter."""
    named = {name: set(c.tokenizer.convert_ids_to_tokens(sorted(c.control_ids))) for name, c in real_codecs.items()}
    assert named["gpt-2"] == {"<|endoftext|>"}
    assert {"<s>", "</s>", "<unk>", "<|endoftext|>", "<|end|>", "<|user|>"} < named["phi-3"]
    assert {"[PAD100015]", "[PAD100041]"} < named["deepseek-llm"] and "\u00f8" not in named["deepseek-llm"]


def test_fingerprints_compare_content(small, tmp_path):
    chars, pairs = small["chars"], small["pairs"]
    copy = make_tokenizer(tmp_path / "elsewhere", CHARACTERS)
    copy.chat_template = "{{ messages }}"
    copy.add_special_tokens({"eos_token": "<pad>"})
    assert tokenizer_fingerprint(copy) == tokenizer_fingerprint(chars)
    assert tokenizer_fingerprint(chars) != tokenizer_fingerprint(pairs)
    swapped = (CHARACTERS[1], CHARACTERS[0], *CHARACTERS[2:])
    assert tokenizer_fingerprint(make_tokenizer(tmp_path / "swapped", swapped)) != tokenizer_fingerprint(chars)
    copy.add_tokens(["12"])
    assert tokenizer_fingerprint(copy) != tokenizer_fingerprint(chars)


@real
def test_real_fingerprints(tmp_path, real_codecs):
    shutil.copytree(REAL / "phi-3", tmp_path / "copy", copy_function=shutil.copyfile)
    assert tokenizer_fingerprint(load_tokenizer(tmp_path / "copy")) == real_codecs["phi-3"].fingerprint
    assert len({codec.fingerprint for codec in real_codecs.values()}) == 3


ANSWERS = (
    "x", " x", "  two spaces", "=4", "== 4", "\n\nThus", "\n", " ", "42",
    "a\tb", "é 数学 😀 \u00a0", "\\boxed{3}", "1,000",
    "It ends <|endoftext|> here", "a  .  b , don ' t", "=\n=", "a=", "11",
)  # fmt: skip


@real
@pytest.mark.parametrize("text", ANSWERS)
def test_an_answer_survives_alone_and_behind_its_prompt(real_codecs, text):
    prompt = "Solve: 2+2"
    for name, codec in real_codecs.items():
        ids = codec.encode_answer(text, ended=True)
        assert ids.index(codec.eos_id) == len(ids) - 1, name
        assert codec.decode_answer(ids) == text, name
        behind = codec.tokenizer.decode(codec.encode_prompt(prompt) + ids, skip_special_tokens=True)
        assert behind == prompt + text, name


@real
def test_answers_encoded_together_are_those_encoded_alone(real_codecs):
    """Also where a text merges with the first anchor ("== 4" behind "=")."""
    for codec in real_codecs.values():
        one_by_one = [codec.encode_answer(text, False) for text in ("", *ANSWERS)]
        for num_threads in (1, 3):
            assert codec.encode_answers(["", *ANSWERS], num_threads) == one_by_one


@real
def test_a_continuation_gets_no_space_marker(real_codecs):
    """Encoded by itself "x" is the word marker and x; as a continuation of a prompt it must not be."""
    phi = real_codecs["phi-3"]
    assert phi.tokenizer.convert_ids_to_tokens(phi.tokenizer("x", add_special_tokens=False).input_ids) == ["▁x"]
    assert phi.tokenizer.convert_ids_to_tokens(phi.encode_answer("x", ended=False)) == ["x"]
    assert phi.decode_answer(phi.encode_answer("", ended=True)) == ""


@pytest.mark.nightly
@real
@given(text=st.text(alphabet=st.characters(exclude_categories=("Cs",)), max_size=30))
@settings(max_examples=300)
def test_any_text_comes_back(real_codecs, text):
    """Except where a vocabulary itself cannot: Phi-3 writes ▁ for a space, DeepSeek has broken one-letter entries."""
    cannot = {
        "gpt-2": set(),
        "phi-3": {"▁"},
        "deepseek-llm": set(real_codecs["deepseek-llm"].tokenizer.get_added_vocab()),
    }
    for name, codec in real_codecs.items():
        if not cannot[name] & set(text):
            assert codec.decode_answer(codec.encode_answer(text, ended=True)) == text, name


@real
def test_half_a_character_decodes_without_crashing(real_codecs):
    for codec in real_codecs.values():
        ids = codec.encode_answer("😀", ended=False)
        assert "\ufffd" in codec.decode_answer(ids[:1])


def test_an_end_token_that_a_tokenizer_adds_is_no_part_of_a_prompt(tmp_path):
    tokenizer = make_tokenizer(tmp_path, CHARACTERS)
    end = [{"Sequence": {"id": "A", "type_id": 0}}, {"SpecialToken": {"id": "<eos>", "type_id": 0}}]
    content = json.loads((tmp_path / "tokenizer.json").read_text())
    content["post_processor"] = {
        "type": "TemplateProcessing", "single": end, "pair": end,
        "special_tokens": {"<eos>": {"id": "<eos>", "ids": [1], "tokens": ["<eos>"]}},
    }  # fmt: skip
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    closing = load_tokenizer(tmp_path)
    assert closing("1+2=").input_ids[-1] == 1
    assert TextCodec(closing).encode_prompt("1+2=") == tuple(tokenizer("1+2=").input_ids)
    assert TextCodec(closing).prompt_lengths(["1+2=", "1"]) == [4, 1]


@real
def test_lengths_all_at_once_are_those_one_by_one(real_codecs):
    for codec in real_codecs.values():
        assert codec.prompt_lengths(ANSWERS) == [len(codec.encode_prompt(text)) for text in ANSWERS]


@pytest.mark.parametrize("template", [None, "{% for m in messages %}{{ m.content }}{% endfor %}"])
def test_of_a_prompt_far_too_long_only_the_start_is_encoded(small, template):
    """A stranger's 10 MB are seen to be too long by their first characters; whatever fits is counted as before."""
    tokenizer = copy.deepcopy(small["pairs"])
    tokenizer.chat_template = template
    codec = TextCodec(tokenizer, Prompting(chat_template=template is not None))
    texts = ["1+" * n for n in (1, 4, 5, 64, 65, 200)]
    # its last character has no token: whoever reads as far as that says so
    limited = codec.prompt_lengths([*texts, "1+" * 5_000_000 + "x"], limit=8)
    assert [min(n, 9) for n in limited] == [*(min(n, 9) for n in codec.prompt_lengths(texts)), 9]


KNOWN = {"0": "<pad>", "1": "<eos>"}
# Contents of files beside a tokenizer.json of 19 tokens (0 to 18), of a model with 19 rows. Each is changed or added.
BESIDE = {
    "nothing": {},
    "an added token": {"tokenizer_config": {"added_tokens_decoder": {"19": "<x>"}}},
    "an added token far away": {"tokenizer_config": {"added_tokens_decoder": {**KNOWN, "25": "<x>"}}},
    "known added tokens": {"tokenizer_config": {"added_tokens_decoder": KNOWN}},
    "added_tokens.json": {"added_tokens": {"<x>": 19}},
    "added_tokens.json, known": {"added_tokens": {"<eos>": 1, "7": 9}},
    "added_tokens.json that is not read": {
        "added_tokens": {"<x>": 19}, "tokenizer_config": {"added_tokens_decoder": KNOWN}
    },
    "an older map": {"special_tokens_map": {"pad_token": "<x>"}},
    "an older map's list": {"special_tokens_map": {"additional_special_tokens": ["<x>"]}},
    "an older map that is not read": {
        "special_tokens_map": {"bos_token": "<x>"}, "tokenizer_config": {"added_tokens_decoder": KNOWN}
    },
    "bos": {"tokenizer_config": {"bos_token": "<x>"}},
    "a list": {"tokenizer_config": {"additional_special_tokens": ["<x>", "<eos>"]}},
    "a known list": {"tokenizer_config": {"extra_special_tokens": ["1", "<eos>"]}},
    "a table": {"tokenizer_config": {"extra_special_tokens": {"image_token": "<x>"}}},
    "a list of objects": {"tokenizer_config": {"extra_special_tokens": [{"content": "<eos>"}]}},
    "a token of images": {"tokenizer_config": {"image_token": "<x>"}},
    "flags": {"tokenizer_config": {"add_bos_token": True, "bos_token": None}},
    "qwen's class": {"tokenizer_config": {"tokenizer_class": "Qwen2TokenizerFast"}},
    "qwen's class, set": {"tokenizer_config": {"tokenizer_class": "Qwen2Tokenizer", "unk_token": None}},
    "llama's class": {"tokenizer_config": {"tokenizer_class": "LlamaTokenizerFast"}},
    "an unknown class": {"tokenizer_config": {"tokenizer_class": "OurTokenizer"}},
    "an eos that nobody reads": {
        "special_tokens_map": {"eos_token": "<eos>"},
        "tokenizer_config": {"eos_token": None, "added_tokens_decoder": KNOWN},
    },
}  # fmt: skip


@pytest.mark.parametrize("case", BESIDE)
def test_files_alone_tell_what_the_tokenizer_would_not_fit(tmp_path, case):
    """`check` refuses what loading refuses, and nothing else."""
    make_tokenizer(tmp_path, CHARACTERS)
    for name, change in BESIDE[case].items():
        file = tmp_path / f"{name}.json"
        table = json.loads(file.read_text()) if file.is_file() else {}
        if added := change.get("added_tokens_decoder"):
            flags = dict.fromkeys(("lstrip", "rstrip", "normalized", "single_word"), False) | {"special": True}
            change = change | {"added_tokens_decoder": {i: {"content": text, **flags} for i, text in added.items()}}
        file.write_text(json.dumps(table | change))
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 19}))
    told = token_problem(tmp_path, 19)
    assert told is None or str(tmp_path) in told
    with pytest.raises(ValueError, match=r".") if told else nullcontext():
        TextCodec(load_tokenizer(tmp_path)).require_fit(19)
    if any("<x>" in str(change) for change in BESIDE[case].values()) and told:
        assert "'<x>' is no token of tokenizer.json and would get an id beyond the model's 19" in told


@pytest.mark.parametrize("name", CLASS_TOKENS)
def test_the_tokens_of_a_class_are_those_that_transformers_gives_it(name):
    parameters = inspect.signature(getattr(transformers, name).__init__).parameters
    given = {key: parameter.default for key, parameter in parameters.items() if key.endswith("_token")}
    assert {key: value for key, value in given.items() if isinstance(value, str)} == CLASS_TOKENS[name]


def test_transformers_warns_of_no_length_that_nothing_is_cut_to(tmp_path, caplog):
    make_tokenizer(tmp_path, CHARACTERS)
    described = json.loads((tmp_path / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(described | {"model_max_length": 3}))
    transformers.utils.logging.enable_propagation()
    try:
        assert len(TextCodec(load_tokenizer(tmp_path)).encode_prompt("1+2+3+4")) == 7
        assert len(load_tokenizer(tmp_path)(["1+2+3+4"]).input_ids[0]) == 7
    finally:
        transformers.utils.logging.disable_propagation()
    assert caplog.text == ""


def test_a_prompt_that_an_agent_cannot_read_is_named_with_its_row(tmp_path):
    """File, line and agent, wherever it stands; of the second agent, since the first one reads it."""
    file = tmp_path / "rows.jsonl"
    rows = [{"prompt": f"{number}+1=", "answer": "2"} for number in range(30)]
    rows[17]["prompt"] = "10x=;"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name, vocabulary in (("wide", (*CHARACTERS, "x")), ("narrow", CHARACTERS)):
        make_tokenizer(tmp_path / name, vocabulary)
        (tmp_path / name / "config.json").write_text("{}")
    agents = [AgentConfig(name=name, model=tmp_path / name) for name in ("wide", "narrow")]
    config = SimpleNamespace(
        data=DataConfig(files=[file]), evaluation=EvaluationConfig(files=[file]), rollout=RolloutConfig()
    )
    num_tokens = longest_encodings(agents, agent_codecs(agents))
    for read in (training_sampler, held_out_prompts):
        line = f"{file}:18: agents.narrow: the tokenizer cannot encode '10x=;': "
        with pytest.raises(ValueError, match=f"^{re.escape(line)}[^\n]*; it has no token for 'x'$"):
            read(config, num_tokens)


def test_sized_tokenizers_sample_text_that_both_agents_read(tmp_path):
    """launch/gpu/sized_models.py: any tokens but the end are text, which the other one has in other tokens."""
    make = runpy.run_path(str(ROOT / "launch/gpu/sized_models.py"))["make_tokenizer"]
    make(tmp_path / "one", 12_000, 1)
    make(tmp_path / "two", 10_000, 2)
    one, two = (load_tokenizer(tmp_path / name) for name in ("one", "two"))
    assert (len(one), len(two)) == (12_000, 10_000)
    text = one.decode(np.random.default_rng(0).integers(2, 12_000, 256).tolist())
    ids = two.encode(text, add_special_tokens=False)
    assert text.isprintable() and two.decode(ids) == text and ids != one.encode(text, add_special_tokens=False)
