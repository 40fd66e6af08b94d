"""The tokens that end answers: chat templates as families publish them, by the tokenizer and by the files alone."""

import json
from pathlib import Path

import pytest
from end_cases import CASES, CHATML, GEMMA
from run_cases import CHARACTERS
from view_cases import PAIRS, constant, learner_view, one_prompt, rules_of, trajectory

from hacpo_mega.config import AgentConfig, Prompting
from hacpo_mega.config.checks.tokenizer_checks import folder_ends
from hacpo_mega.megatron.weights.hf_writer import name_end
from hacpo_mega.models.files.folder import named_ends
from hacpo_mega.samples.tokenizers import TextCodec, load_tokenizer, make_tokenizer

LETTERS = ("\n", *map(chr, range(32, 127)))


def make_folder(folder: Path, template: str | None, eos: str, named: list[str], vocabulary=LETTERS) -> dict[str, int]:
    """A model folder without weights whose files name these ends; the ids of its control tokens."""
    shown = [token for case in CASES.values() for token in (case[1], *case[2], case[3])]
    steering = list(dict.fromkeys(("<bos>", *shown, "<|im_start|>", "<|start|>", "<|message|>", "<|end|>")))
    tokenizer = make_tokenizer(folder, vocabulary)
    tokenizer.add_special_tokens({"additional_special_tokens": steering, "eos_token": eos, "bos_token": "<bos>"})
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    ids = dict(zip(steering, tokenizer.convert_tokens_to_ids(steering)))
    (folder / "config.json").write_text(json.dumps({"vocab_size": len(tokenizer)}))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [ids[token] for token in named]}))
    return ids


def codec_of(folder: Path, template: str | None) -> TextCodec:
    return TextCodec(load_tokenizer(folder), Prompting(chat_template=template is not None))


@pytest.mark.nightly
@pytest.mark.parametrize("case", CASES)
def test_the_end_of_others_answers_is_the_learners_own(tmp_path, case):
    """By the tokenizer as a run loads it, and by the files alone as `check` reads them."""
    template, eos, named, end, added = CASES[case]
    ids = make_folder(tmp_path, template, eos, named)
    codec = codec_of(tmp_path, template)
    assert codec.token_text(codec.eos_id) == end
    assert codec.encode_answer("42", ended=True)[-1] == ids[end]
    assert codec.ends.added == (None if added is None else ids[added])
    assert set(codec.ends.ids) == {ids[token] for token in (*named, eos, *((added,) if added else ()))}
    agent = AgentConfig(name="a", model=tmp_path, chat_template=template is not None)
    assert folder_ends(agent)[0] == codec.ends


@pytest.mark.parametrize("case", ["gemma", "phi", "glm"])
def test_a_foreign_answer_is_trained_with_the_end_that_the_learner_says(tmp_path, case):
    """Its source ends with another token of another tokenizer."""
    template, eos, named, end, _ = CASES[case]
    ids = make_folder(tmp_path / "learner", template, eos, named)
    source = TextCodec(make_tokenizer(tmp_path / "source", PAIRS))
    codec = codec_of(tmp_path / "learner", template)
    pool = one_prompt((trajectory(codec, 0, 0, "1"),), (trajectory(source, 1, 0, "12;12"),))
    samples, counts = learner_view(pool, constant(pool), 0, codec, rules_of((codec, source)))
    text = [LETTERS.index(sign) + 2 for sign in "12;12"]
    assert [sample.answer_ids.tolist() for sample in samples[1:]] == [[*text, ids[end]]]
    assert counts.num_reencoded == 1


def test_a_twins_own_end_stays_where_the_learner_has_it(tmp_path):
    """The end that was sampled is the likely one; one that the learner never says becomes its own."""
    ids = make_folder(tmp_path, GEMMA, "<eos>", ["<eos>", "<end_of_turn>"])
    codec, one, eos, turn = codec_of(tmp_path, GEMMA), LETTERS.index("1") + 2, ids["<eos>"], ids["<end_of_turn>"]
    for sampled, kept in ((turn, turn), (eos, eos), (ids["<|im_end|>"], turn)):
        pool = one_prompt((trajectory(codec, 0, 0, "2"),), (trajectory(codec, 1, 0, "1", ids=[one, sampled]),))
        samples, _ = learner_view(pool, constant(pool), 0, codec, rules_of((codec, codec)))
        assert samples[1].answer_ids.tolist() == [one, kept]


def test_no_end_of_answers_stays_at_the_end_of_a_prompt(tmp_path):
    """Whichever of several ends the tokenizer puts behind every text, and a token that is no end at all."""
    for token, eos in (("<end_of_turn>", "<eos>"), ("<|message|>", "<eos>"), ("<eos>", "<eos>")):
        folder = tmp_path / token.strip("<|>")
        ids = make_folder(folder, None, eos, ["<eos>", "<end_of_turn>"], CHARACTERS)
        content = json.loads((folder / "tokenizer.json").read_text())
        closed = [{"Sequence": {"id": "A", "type_id": 0}}, {"SpecialToken": {"id": token, "type_id": 0}}]
        special = {token: {"id": token, "ids": [ids[token]], "tokens": [token]}}
        content["post_processor"] = {
            "type": "TemplateProcessing", "single": closed, "pair": closed, "special_tokens": special,
        }  # fmt: skip
        (folder / "tokenizer.json").write_text(json.dumps(content))
        codec = codec_of(folder, None)
        assert codec.tokenizer("1+2").input_ids[-1] == ids[token]
        assert codec.encode_prompt("1+2") == tuple(CHARACTERS.index(sign) + 2 for sign in "1+2")


def test_an_end_that_is_no_special_token_is_no_text_either(tmp_path):
    """Gemma-shaped, with an <end_of_turn> that is an ordinary added token: a text that spells it would end there."""
    make_folder(tmp_path, GEMMA, "<eos>", ["<eos>", "<end_of_turn>"])
    content = json.loads((tmp_path / "tokenizer.json").read_text())
    for token in content["added_tokens"]:
        token["special"] = token["content"] != "<end_of_turn>"
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    described = json.loads((tmp_path / "tokenizer_config.json").read_text())
    for key in ("extra_special_tokens", "additional_special_tokens"):
        described.pop(key, None)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(described))
    codec = codec_of(tmp_path, GEMMA)
    assert codec.token_text(codec.eos_id) == "<end_of_turn>" and codec.eos_id in codec.control_ids
    with pytest.raises(ValueError, match="spells out <end_of_turn>"):
        codec.encode_prompt("1<end_of_turn>")


def test_an_export_names_the_end_that_its_template_added(tmp_path):
    ids = make_folder(tmp_path, CHATML, "<|endoftext|>", ["<|endoftext|>"])
    codec = codec_of(tmp_path, CHATML)
    kept = (tmp_path / "generation_config.json").read_bytes()
    name_end(tmp_path, None)
    assert (tmp_path / "generation_config.json").read_bytes() == kept
    name_end(tmp_path, codec.ends.added)
    assert json.loads((tmp_path / "generation_config.json").read_text()) == {
        "eos_token_id": [ids["<|endoftext|>"], ids["<|im_end|>"]]
    }
    served = codec_of(tmp_path, CHATML)
    assert served.ends.added is None and served.ends.ids == codec.ends.ids
    assert set(named_ends(tmp_path)[1]) == set(codec.ends.ids), "whoever reads the files alone stops there, too"
    (tmp_path / "generation_config.json").unlink()
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 99, "eos_token_id": 7, "pad_token_id": 0}))
    name_end(tmp_path, 9)
    written = json.loads((tmp_path / "generation_config.json").read_text())
    assert written == {"eos_token_id": [7, 9], "pad_token_id": 0}
