"""Answers that a learner cannot read as their author meant them: ids without a token, control tokens, changed texts."""

import itertools
from dataclasses import replace

import pytest
from repository import SHARED
from run_cases import CHARACTERS
from view_cases import PAIRS, PROMPTS, constant, learner_view, one_prompt, rules_of, trajectory

from hacpo_mega.records import Pool, ReencodingCounts, Stop
from hacpo_mega.samples.tokenizers import TextCodec, load_tokenizer, make_tokenizer

REAL = SHARED / "tokenizers"
real = pytest.mark.skipif(not REAL.is_dir(), reason=f"real tokenizers are not in {REAL}")


@pytest.fixture(scope="module")
def codecs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizers")
    return TextCodec(make_tokenizer(folder / "a", CHARACTERS)), TextCodec(make_tokenizer(folder / "b", PAIRS))


@pytest.fixture(scope="module")
def real_codecs():
    return {name: TextCodec(load_tokenizer(REAL / name)) for name in ("gpt-2", "phi-3", "deepseek-llm")}


def seen_by(learner, sources, *trajectories, **changes):
    """The samples and counts of one learner, for one answer of every agent."""
    pool = one_prompt(*[(one,) for one in trajectories])
    samples, counts = learner_view(pool, constant(pool), learner, sources[learner], rules_of(sources, **changes))
    return {sample.source: sample.answer_ids.tolist() for sample in samples}, counts


@pytest.mark.parametrize("stop", [Stop.EOS, Stop.LENGTH])
def test_ids_without_a_token_are_trained_on_by_their_own_agent_alone(codecs, stop):
    """A model with more rows than its tokenizer has tokens samples 40 of 33: its text is that of the other ids."""
    chars, pairs = codecs
    ids = [*pairs.encode_answer("12", False), 40, *pairs.encode_answer("5", stop == Stop.EOS)]
    text = pairs.decode_answer(ids[:-1] if stop == Stop.EOS else ids)
    assert text == "125"
    odd = trajectory(pairs, 0, 0, text, stop, ids=ids)
    twin, other = trajectory(pairs, 1, 0, "1"), trajectory(chars, 2, 0, "1")
    sources = (pairs, pairs, chars)
    own, counts = seen_by(0, sources, odd, twin, other)
    assert (own[0], counts.num_undecodable, counts.num_cross) == (ids, 1, 2)
    for learner in (1, 2):
        seen, counts = seen_by(learner, sources, odd, twin, other)
        assert (sorted(seen), counts.num_undecodable, counts.num_own, counts.num_cross) == ([1, 2], 1, 1, 1)
    honest = trajectory(pairs, 0, 0, "125", stop)
    assert seen_by(2, sources, honest, twin, other)[1].num_undecodable == 0


@pytest.mark.parametrize("control", [0, 1])
def test_a_control_token_sampled_before_the_end_is_nobody_elses(codecs, control):
    """Pad or EOS inside an answer leave no trace in the text that is judged."""
    chars, pairs = codecs
    ids = [*pairs.encode_answer("1", False), control, *pairs.encode_answer("2", True)]
    odd = trajectory(pairs, 0, 0, pairs.decode_answer(ids), ids=ids)
    assert odd.rollout.text == "12"
    twin, other = trajectory(pairs, 1, 0, "1"), trajectory(chars, 2, 0, "1")
    for learner, expected in ((0, [0, 1, 2]), (1, [1, 2]), (2, [1, 2])):
        seen, counts = seen_by(learner, (pairs, pairs, chars), odd, twin, other)
        assert (sorted(seen), counts.num_undecodable, counts.num_control_tokens) == (expected, 1, 0)


@pytest.mark.parametrize("text", ["1;<pad>", "<pad>", "<eos>1", "1<eos>", "1<eos>2"])
@pytest.mark.parametrize("stop", [Stop.EOS, Stop.LENGTH])
def test_a_control_token_spelled_out_is_not_trained_on(tmp_path, text, stop):
    """The source writes the signs one by one; in the learner's vocabulary they are one token that steers it."""
    spelling = TextCodec(make_tokenizer(tmp_path / "source", (*CHARACTERS, *"<>adeop")))
    reading = TextCodec(make_tokenizer(tmp_path / "learner", CHARACTERS[:-1]))
    written = trajectory(spelling, 1, 0, text, stop)
    assert spelling.decode_answer(written.rollout.token_ids) == text
    assert spelling.shows(written.rollout.token_ids[: len(text)])
    seen, counts = seen_by(0, (reading, spelling), trajectory(reading, 0, 0, "1"), written, trains_changed=True)
    assert (list(seen), counts) == ([0], ReencodingCounts(num_own=1, num_control_tokens=1))
    assert [answer.reason for answer in counts.dropped] == ["control_tokens"]


def test_the_end_of_a_twin_inside_an_answer_is_not_trained_on(tmp_path):
    """A base model and its instruct twin: one tokenizer, two end tokens. One may write the other's in the middle."""
    vocabulary = (*CHARACTERS, "<im_end>")
    base, instruct = (make_tokenizer(tmp_path / name, vocabulary) for name in ("base", "instruct"))
    end = vocabulary.index("<im_end>") + 2
    sources = TextCodec(base), TextCodec(instruct)
    sources[1].eos_id, sources[1].control_ids = end, frozenset((0, end))
    assert sources[0].fingerprint == sources[1].fingerprint
    ids = [*sources[0].encode_answer("1", False), 1, *sources[0].encode_answer("2", False), end]
    written = trajectory(sources[1], 1, 0, "12", ids=ids)
    seen, counts = seen_by(0, sources, trajectory(sources[0], 0, 0, "1"), written)
    assert (list(seen), counts) == ([0], ReencodingCounts(num_own=1, num_control_tokens=1))


def test_a_text_that_reads_differently_is_trained_on_only_when_asked(codecs):
    """A learner whose tokenizer writes 1 for the source's 0: an answer with a 0 comes back as another."""

    class Changing(TextCodec):
        def decode_answer(self, ids):
            return super().decode_answer(ids).replace("0", "1")

    changing = Changing(codecs[0].tokenizer)
    own, written = trajectory(changing, 0, 0, "1"), trajectory(codecs[1], 1, 0, "10")
    sources = (changing, codecs[1])
    assert seen_by(0, sources, own, written)[1] == ReencodingCounts(num_own=1, num_compared=1, num_changed=1)
    seen, counts = seen_by(0, sources, own, written, trains_changed=True)
    assert (seen[1], counts.num_changed, counts.num_cross) == (list(codecs[0].encode_answer("10", True)), 1, 1)


@real
def test_spelled_control_tokens_of_real_tokenizers(real_codecs):
    """Every pair: what the learner's tokenizer turns into a control token is left out, the rest is trained on."""
    texts = ["a </s> b", "<|endoftext|>", "x<s>", "[PAD100015]", "so <think>2</think>", "2 < 3 > 1", "a <unk> b"]
    controlled = {
        "gpt-2": set(),
        "phi-3": {"a </s> b"},
        "deepseek-llm": {"[PAD100015]"},
    }
    for (source, writing), (learner, reading) in itertools.permutations(real_codecs.items(), 2):
        for text in set(texts) - controlled[source]:
            own, written = trajectory(reading, 0, 0, "1"), trajectory(writing, 1, 0, text)
            seen, counts = seen_by(0, (reading, writing), own, written, max_answer_tokens=99)
            assert (1 not in seen) == (counts.num_control_tokens == 1) == (text in controlled[learner]), (learner, text)
            if 1 in seen:
                assert not reading.control_ids.intersection(seen[1][:-1])
                assert reading.tokenizer.decode(seen[1][:-1]).strip() == text


@real
def test_changed_texts_of_a_real_tokenizer(real_codecs):
    """Phi-3 has one sign for a space and for itself: an answer with it comes back as another text."""
    sources = (real_codecs["phi-3"], real_codecs["gpt-2"])
    own, written = trajectory(sources[0], 0, 0, "1"), trajectory(sources[1], 1, 0, "a\u2581b")
    assert seen_by(0, sources, own, written)[1] == ReencodingCounts(num_own=1, num_compared=1, num_changed=1)
    assert seen_by(0, sources, own, written, trains_changed=True)[1].num_cross == 1


@real
def test_ids_beyond_a_real_tokenizer(real_codecs):
    """GPT-2 models are often padded to 50,304 rows; id 50,300 has no token, and vanishes from the text."""
    sources = (real_codecs["gpt-2"], real_codecs["phi-3"])
    ids = [*sources[0].encode_answer("It is 2", False), 50300, sources[0].eos_id]
    odd = trajectory(sources[0], 0, 0, sources[0].decode_answer(ids[:-1]), ids=ids)
    assert odd.rollout.text == "It is 2"
    seen, counts = seen_by(1, sources, odd, trajectory(sources[1], 1, 0, "1"))
    assert (list(seen), counts) == ([1], ReencodingCounts(num_own=1, num_undecodable=1))
    assert [answer.reason for answer in counts.dropped] == ["undecodable"]


@real
def test_real_tokenizers_exchange_answers(real_codecs):
    """Three designs: every sample reads like its source, a broken character stays its agent's, prompts are cached."""
    real = list(real_codecs.values())
    for codec in real:
        codec._prompt_ids.cache_clear()
    texts = ("We have $x^2 = 4$,\n so \\boxed{2}.", " 42", "naïve 数学 😀", "A<|endoftext|>B")
    by_agent = [tuple(trajectory(codec, j, g, text) for g, text in enumerate(texts)) for j, codec in enumerate(real)]
    half = real[0].encode_answer("😀", False)[:1]
    broken = trajectory(real[0], 0, 3, real[0].decode_answer(half), Stop.LENGTH, ids=half)
    by_agent[0] = (*by_agent[0][:3], broken)
    pool = Pool((replace(PROMPTS[0], text="Solve it."),), (tuple(by_agent),))
    for learner, codec in enumerate(real):
        samples, counts = learner_view(pool, constant(pool), learner, codec, rules_of(real, max_answer_tokens=99))
        assert len(samples) == (12 if learner == 0 else 11)
        for sample in samples:
            source = by_agent[sample.source][sample.rollout_index].rollout
            assert codec.decode_answer(sample.answer_ids.tolist()) == source.text
        found = (counts.num_undecodable, counts.num_truncated, counts.num_reencoded, counts.num_changed)
        assert found == ((1, 1, 8, 0) if learner == 0 else (1, 0, 7, 0))
    assert real[0]._prompt_ids.cache_info().misses == 1
