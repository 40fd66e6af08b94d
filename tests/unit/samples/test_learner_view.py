"""Samples that a learner trains on, against hand-made pools: ids, ends, lengths, drops and counts."""

import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from run_cases import CHARACTERS
from turn_cases import GLM_TOOLS, TOOLS, ByHand, TurnCase, said
from view_cases import (
    PAIRS,
    PROMPTS,
    constant,
    learner_view,
    one_prompt,
    own_scores,
    rules_of,
    trajectory,
    view_by_source,
)

from hacpo_mega.config import Prompting
from hacpo_mega.conversations.turn_format import TurnFormat
from hacpo_mega.records import (
    HISTORY,
    Conversation,
    History,
    Pool,
    ReencodingCounts,
    Rollout,
    Stop,
    Trajectory,
    Turn,
    Verdict,
)
from hacpo_mega.rollout.wire import conversation_of, conversation_text
from hacpo_mega.samples.tokenizers import TextCodec, make_tokenizer


@pytest.fixture(scope="module")
def codecs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizers")
    return TextCodec(make_tokenizer(folder / "a", CHARACTERS)), TextCodec(make_tokenizer(folder / "b", PAIRS))


def test_an_answer_that_moves_no_gradient_is_left_out_and_counted(codecs):
    """Own answers go or stay with their prompt; an unjudged one of another agent is counted as that."""
    mine = [trajectory(codecs[0], 0, g, "7") for g in range(2)]
    theirs = [trajectory(codecs[1], 1, 0, "8"), trajectory(codecs[1], 1, 1, "9", verdict=Verdict.ERROR)]
    pool = one_prompt(mine, theirs)
    trains = torch.tensor([[[True, True], [False, False]]])
    samples, counts = learner_view(pool, constant(pool), 0, codecs[0], rules_of(codecs), trains)
    assert [(sample.source, sample.rollout_index) for sample in samples] == [(0, 0), (0, 1)]
    assert (counts.num_own, counts.num_cross, counts.num_zero_advantage, counts.num_unjudged) == (2, 0, 1, 1)
    samples, counts = learner_view(pool, constant(pool), 0, codecs[0], rules_of(codecs), ~trains)
    assert [(sample.source, sample.rollout_index) for sample in samples] == [(1, 0)]
    assert (counts.num_own, counts.num_cross, counts.num_zero_advantage, counts.num_unjudged) == (0, 1, 2, 1)


def test_a_broken_model_blocks_itself_alone(codecs):
    """Log-probs that are no number: their author trains on them, so its update is skipped; nobody else does."""
    broken = [replace(trajectory(codecs[1], 1, g, "8"), mean_logprob=math.nan) for g in range(2)]
    broken[1] = replace(broken[1], mean_logprob=-0.5, engine_weight=math.nan)
    pool = one_prompt([trajectory(codecs[0], 0, g, "7") for g in range(2)], broken)
    samples, (_, counts) = view_by_source(pool, constant(pool), 0, codecs[0], rules_of(codecs))
    assert [(sample.source, sample.rollout_index) for sample in samples] == [(0, 0), (0, 1)]
    assert (counts.num_cross, counts.num_not_finite, counts.num_reencoded) == (0, 2, 0)
    weighed = constant(pool) * pool.engine_weights_PNG
    samples, (_, counts) = view_by_source(pool, weighed, 1, codecs[1], rules_of(codecs))
    own = [sample for sample in samples if sample.source == 1]
    assert math.isnan(own[0].source_logprob) and math.isnan(own[1].advantage)
    assert (counts.num_own, counts.num_not_finite) == (2, 0)


def test_an_answer_that_nobody_scored_is_no_broken_one(codecs):
    unscored = replace(trajectory(codecs[1], 1, 0, "8"), mean_logprob=math.nan, num_scored=0)
    pool = one_prompt([trajectory(codecs[0], 0, 0, "7")], [unscored])
    with pytest.raises(AssertionError):
        learner_view(pool, constant(pool), 0, codecs[0], rules_of(codecs))


def test_every_sample_is_its_trajectory_in_the_learners_tokens(codecs):
    """Two agents, two prompts, two answers: written out for learner 0, whose tokenizer has single characters."""
    text = "7+5=12,4+8+1=13;132"
    pool = Pool(
        PROMPTS,
        tuple(
            tuple(tuple(trajectory(codecs[j], j, g, f"{text[: 9 + p]}{g}") for g in range(2)) for j in range(2))
            for p in range(2)
        ),
    )
    advantages = torch.arange(8, dtype=torch.float64).reshape(2, 2, 2)
    samples, counts = learner_view(pool, advantages, 0, codecs[0], rules_of(codecs))
    order = [(p, j, g) for p in range(2) for j in range(2) for g in range(2)]
    assert [(s.prompt_index - 4, s.source, s.rollout_index) for s in samples] == order
    for sample, (p, j, g) in zip(samples, order):
        expected = [*[CHARACTERS.index(c) + 2 for c in f"{text[: 9 + p]}{g}"], 1]
        assert sample.answer_ids.tolist() == expected
        assert sample.prompt_ids.tolist() == [CHARACTERS.index(c) + 2 for c in PROMPTS[p].text]
        assert (sample.answer_ids.dtype, sample.prompt_ids.dtype) == (np.int32, np.int32)
        assert sample.advantage == advantages[p, j, g]
        assert sample.source_logprob == pytest.approx(-0.1 * (g + 1))
        assert sample.is_self == (j == 0)
        assert sample.num_trained == sample.length == len(expected)
        if j == 0:
            score = own_scores(pool, 0)[sample.prompt_index, g]
            np.testing.assert_array_equal(sample.old_logprobs, score.token_logprobs)
        else:
            assert sample.old_logprobs is None, "the source's tokens are not the learner's"
    # "7+5=12,4+" is 9 characters and 7 pairs tokens (=1 and none else), "7+5=12,4+8" one more of each; then g and EOS
    ratios = [11 / 10 if g == 0 else 11 / 9 for g in range(2)]  # ... "+1" is one token where g = 1
    ratios += [12 / 11, 12 / 11]
    assert counts.token_ratio_sum == pytest.approx(sum(ratios))
    assert replace(counts, token_ratio_sum=0) == ReencodingCounts(
        num_own=4, num_cross=4, num_compared=4, num_reencoded=4
    )


def test_own_answers_keep_the_sampled_ids(codecs):
    """The text 12 sampled as 1 and 2, though it has a token: re-encoding would train on another sequence."""
    sampled = [*codecs[1].encode_answer("1", False), *codecs[1].encode_answer("2", True)]
    assert sampled != list(codecs[1].encode_answer("12", True))
    pool = one_prompt((trajectory(codecs[0], 0, 0, "12"),), (trajectory(codecs[1], 1, 0, "12", ids=sampled),))
    rules = rules_of(codecs)
    samples, _ = learner_view(pool, constant(pool), 1, codecs[1], rules)
    assert samples[1].answer_ids.tolist() == sampled
    assert samples[0].answer_ids.tolist() == list(codecs[1].encode_answer("12", True))


def test_an_identical_tokenizer_keeps_ids_and_gets_the_learners_end(codecs):
    """A base model and its instruct twin: the same ids, another EOS. A truncated answer has no end to swap."""
    odd_end, odd_ids = 7, [*codecs[0].encode_answer("12", False), 7]
    pool = one_prompt(
        (trajectory(codecs[0], 0, 0, "1"), trajectory(codecs[0], 0, 1, "1")),
        (
            trajectory(codecs[0], 1, 0, "12", ids=odd_ids),
            trajectory(codecs[0], 1, 1, "125", Stop.LENGTH, ids=odd_ids),
        ),
    )
    samples, counts = learner_view(pool, constant(pool), 0, codecs[0], rules_of(codecs[:1] * 2))
    assert samples[2].answer_ids.tolist() == [*odd_ids[:-1], codecs[0].eos_id]
    assert samples[3].answer_ids.tolist() == odd_ids
    assert odd_ids[-1] == odd_end  # the trajectory itself is untouched
    assert counts == ReencodingCounts(num_own=2, num_cross=2, num_truncated=1)


@pytest.mark.parametrize("eos_in_loss", [True, False])
def test_log_probs_of_others_tokens_are_those_of_agents_with_one_tokenizer(codecs, eos_in_loss):
    """Agent 1 has the learner's tokenizer, agent 2 another one; without tokens that travel nobody has any."""
    writers = (codecs[0], codecs[0], codecs[1])
    groups = [[trajectory(codec, j, 0, "12", eos_in_loss=eos_in_loss)] for j, codec in enumerate(writers)]
    scored = [
        [replace(t, token_logprobs=np.arange(t.num_scored, dtype=np.float32) - 9.0 * j) for t in group]
        for j, group in enumerate(groups)
    ]
    rules = rules_of(writers, eos_in_loss=eos_in_loss)
    for given, has_any in ((scored, True), (groups, False)):
        pool = one_prompt(*map(tuple, given))
        own, twin, foreign = learner_view(pool, constant(pool), 0, codecs[0], rules)[0]
        assert own.old_logprobs.tolist() == own_scores(pool, 0)[4, 0].token_logprobs.tolist()
        assert foreign.old_logprobs is None and foreign.num_trained > 0
        expected = [place - 9.0 for place in range(3 if eos_in_loss else 2)] if has_any else None
        assert expected == (None if twin.old_logprobs is None else twin.old_logprobs.tolist())


@pytest.mark.parametrize("ratio_length", ["own", "source"])
@pytest.mark.parametrize("eos_in_loss", [True, False])
def test_trained_tokens_and_length(codecs, eos_in_loss, ratio_length):
    """ "13,14" is 5 characters and 2 pairs (13 and ,1 and 4: 3 tokens); with EOS 6 and 4; truncated 5 and 3."""
    by_agent = [
        tuple(trajectory(codecs[j], j, g, "13,14", stop, eos_in_loss=eos_in_loss) for g, stop in enumerate(Stop))
        for j in range(2)
    ]
    pool = one_prompt(*by_agent)
    rules = rules_of(codecs, eos_in_loss=eos_in_loss, ratio_length=ratio_length)
    samples, _ = learner_view(pool, constant(pool), 0, codecs[0], rules)
    others = len(Stop) - 1
    own = [6 if eos_in_loss else 5, *[5] * others]
    source = [4 if eos_in_loss else 3, *[3] * others]
    assert [s.num_trained for s in samples] == own * 2
    assert [s.length for s in samples] == own + (own if ratio_length == "own" else source)


def test_unjudged_answers_are_counted_and_teach_nothing(codecs):
    verdicts = (Verdict.TIMEOUT, Verdict.CORRECT, Verdict.ERROR, Verdict.NO_ANSWER)
    pool = one_prompt(
        *(tuple(trajectory(codecs[j], j, g, "1", verdict=v) for g, v in enumerate(verdicts)) for j in (0, 1))
    )
    advantages = constant(pool)
    for p, by_agent in enumerate(pool.trajectories_PNG):
        for n, group in enumerate(by_agent):
            for g, answer in enumerate(group):
                advantages[p, n, g] = advantages[p, n, g] if answer.is_judged else math.nan
    samples, counts = learner_view(pool, advantages, 0, codecs[0], rules_of(codecs))
    # own ones keep their place in the micro-batch, so that the others' ratios repeat their scores bit by bit
    assert [(s.source, s.rollout_index) for s in samples] == [(0, 0), (0, 1), (0, 2), (0, 3), (1, 1), (1, 3)]
    assert [s.advantage for s in samples][0:3:2] == [0.0, 0.0]
    assert (counts.num_unjudged, counts.num_own, counts.num_cross) == (4, 4, 2)


@pytest.mark.parametrize("eos_in_loss", [True, False])
def test_empty_and_truncated_answers_train_on_what_there_is(codecs, eos_in_loss):
    """Others' answers without a token to train are left out by that reason: no micro-batch would have them."""
    by_agent = [
        (
            trajectory(codecs[j], j, 0, "", eos_in_loss=eos_in_loss),
            trajectory(codecs[j], j, 1, "", Stop.LENGTH, eos_in_loss=eos_in_loss),
            trajectory(codecs[j], j, 2, "12", Stop.LENGTH, eos_in_loss=eos_in_loss),
        )
        for j in range(2)
    ]
    pool = one_prompt(*by_agent)
    samples, counts = learner_view(pool, constant(pool), 0, codecs[0], rules_of(codecs, eos_in_loss=eos_in_loss))
    ended = [[1]] if eos_in_loss else []
    assert [s.answer_ids.tolist() for s in samples] == [[1], [], [3, 4], *ended, [3, 4]]
    assert [s.num_trained for s in samples] == [int(eos_in_loss), 0, 2, *[1 for _ in ended], 2]
    assert [s.length for s in samples] == [1, 1, 2, *[1 for _ in ended], 2]
    assert [answer.reason for answer in counts.dropped] == ["no_token"] * (2 - len(ended))
    assert (counts.num_empty, counts.num_truncated, counts.num_cross) == (2 + len(ended), 3, 1 + len(ended))


def test_an_answer_too_long_for_the_learner_is_dropped_whole(codecs):
    """19 pairs tokens fit a limit of 24; as 24 characters and EOS they do not. The learner's own are never dropped."""
    long = "10,11,12,13,14,15,16,17,"
    pool = one_prompt(
        (trajectory(codecs[0], 0, 0, "1" * 30, ids=[3] * 30 + [1]),), (trajectory(codecs[1], 1, 0, long),)
    )
    samples, counts = learner_view(pool, constant(pool), 0, codecs[0], rules_of(codecs))
    assert [s.source for s in samples] == [0]
    assert counts == ReencodingCounts(num_own=1, num_compared=1, num_too_long=1)
    fits, _ = learner_view(pool, constant(pool), 0, codecs[0], rules_of(codecs, max_answer_tokens=25))
    assert len(fits[1].answer_ids) == 25


def test_an_answer_the_learner_has_no_tokens_for_is_dropped(codecs, tmp_path):
    digits = TextCodec(make_tokenizer(tmp_path, tuple("0123456789+=s")))
    pool = one_prompt((trajectory(digits, 0, 0, "12"),), (trajectory(codecs[1], 1, 0, "1;2"),))
    samples, counts = learner_view(pool, constant(pool), 0, digits, rules_of((digits, codecs[1])))
    assert (len(samples), counts) == (1, ReencodingCounts(num_own=1, num_unencodable=1))


def test_alone_nothing_of_others_is_encoded(codecs):
    pool = one_prompt((trajectory(codecs[0], 0, 0, "1"),), (trajectory(codecs[1], 1, 0, "1"),))
    samples, counts = learner_view(pool, constant(pool), 0, codecs[0], rules_of(codecs, shares_answers=False))
    assert ([s.source for s in samples], counts) == ([0], ReencodingCounts(num_own=1))


def test_a_score_over_other_tokens_than_the_loss_trains_is_refused(codecs):
    own = trajectory(codecs[0], 0, 0, "12", eos_in_loss=False)
    pool = one_prompt((own,), (trajectory(codecs[1], 1, 0, "1"),))
    with pytest.raises(AssertionError):
        learner_view(pool, constant(pool), 0, codecs[0], rules_of(codecs))


def test_every_source_is_counted_by_itself(codecs):
    """Learner 0 reads pairs of source 1, its own characters of source 2; of 3 one answer is unjudged, one too long."""
    long = "1" * 24
    pool = one_prompt(
        (trajectory(codecs[0], 0, 0, "1"), trajectory(codecs[0], 0, 1, "")),
        (trajectory(codecs[1], 1, 0, "1213"), trajectory(codecs[1], 1, 1, "5")),
        (trajectory(codecs[0], 2, 0, "12"), trajectory(codecs[0], 2, 1, "5", Stop.LENGTH)),
        (trajectory(codecs[1], 3, 0, "1", verdict=Verdict.ERROR), trajectory(codecs[1], 3, 1, long)),
    )
    sources = (codecs[0], codecs[1], codecs[0], codecs[1])
    _, counts = view_by_source(pool, constant(pool), 0, codecs[0], rules_of(sources))
    assert counts == (
        ReencodingCounts(num_own=2, num_empty=1),
        # 1213 with its end is 5 of the learner's tokens and 3 of the source's, 5 is 2 of both
        ReencodingCounts(num_cross=2, num_compared=2, num_reencoded=2, token_ratio_sum=5 / 3 + 1),
        ReencodingCounts(num_cross=2, num_truncated=1),
        ReencodingCounts(num_unjudged=1, num_compared=1, num_too_long=1),
    )
    assert [[answer.reason for answer in view.dropped] for view in counts] == [[], [], [], ["unjudged", "too_long"]]


def played(codec, agent, turns, eos_in_loss=True):
    """A conversation of `agent`: own turns and what others said, in its characters."""
    parts = [
        Turn("assistant" if n % 2 == 0 else "tool", text, len(ids), Stop.EOS if n % 2 == 0 else None)
        for n, text in enumerate(turns)
        for ids in [codec.encode_answer(text, n % 2 == 0)]
    ]
    ids = np.concatenate([codec.encode_answer(turn.content, turn.is_own) for turn in parts]).astype(np.int32)
    conversation = Conversation(tuple(parts))
    rollout = Rollout(4, 0, ids, turns[-1], Stop.EOS, None, None, conversation)
    return Trajectory(agent, rollout, Verdict.CORRECT, 1.0, -0.1, rollout.num_trained(eos_in_loss))


@pytest.mark.parametrize("eos_in_loss", [True, False])
def test_a_conversation_is_read_in_the_learners_own_tokens(codecs, eos_in_loss):
    """Own turns are encoded and trained, each with the learner's end token; the tool's are rendered, and context."""
    heads = []

    def continuation(head, others, *, ended):
        heads.append((list(head), [message["content"] for message in others], ended))
        return list(codecs[1].encode_answer(";" + others[0]["content"] + ";", False))

    pool = one_prompt(
        [played(codecs[0], 0, ["12+3", "15", "15=15"], eos_in_loss)],
        [trajectory(codecs[1], 1, 0, "7", eos_in_loss=eos_in_loss)],
    )
    rules = rules_of(codecs, eos_in_loss=eos_in_loss, turns=SimpleNamespace(continuation=continuation))
    samples, (counts, _) = view_by_source(pool, constant(pool), 1, codecs[1], rules)
    (sample,) = [sample for sample in samples if sample.source == 0]
    first, said, last = (codecs[1].encode_answer(*turn) for turn in (("12+3", True), (";15;", False), ("15=15", True)))
    assert sample.answer_ids.tolist() == [*first, *said, *last]
    prompt = list(codecs[1].encode_prompt(PROMPTS[0].text))
    assert heads == [([*prompt, *first], ["15"], True)]
    ends = 0 if eos_in_loss else 1
    start = len(first) + len(said)
    assert sample.trained_places.tolist() == [*range(len(first) - ends), *range(start, start + len(last) - ends)]
    assert sample.num_trained == len(sample.trained_places) == sample.length
    assert (counts.num_cross, counts.num_reencoded, counts.num_compared) == (1, 1, 1), "an answer of two own turns"
    short = replace(rules, max_answer_tokens=len(sample.answer_ids) - 1)
    samples, (counts, _) = view_by_source(pool, constant(pool), 1, codecs[1], short)
    assert counts.num_too_long == 1


def test_an_own_conversation_keeps_what_was_sampled_and_what_was_read(codecs):
    pool = one_prompt([played(codecs[0], 0, ["12+3", "15", "15"])], [trajectory(codecs[1], 1, 0, "7")])
    samples, _ = view_by_source(pool, constant(pool), 0, codecs[0], rules_of(codecs))
    own = samples[0]
    assert own.answer_ids.tolist() == pool.trajectories_PNG[0][0][0].rollout.token_ids.tolist()
    assert own.trained_places.tolist() == [0, 1, 2, 3, 4, 7, 8, 9]
    assert own.target_ids.tolist() == [*codecs[0].encode_answer("12+3", True), *codecs[0].encode_answer("15", True)]


def test_a_call_of_a_tool_ends_as_the_learners_template_goes_on(tmp_path):
    """GLM's ends are headers of what follows. A twin's sampled end stays, as in its own record."""
    by_hand, call = ByHand(tmp_path), '{"name": "calculate", "arguments": {"term": "6*7"}}'
    reader = by_hand.codec(TurnCase(GLM_TOOLS, "<|user|>", said, named=["<|endoftext|>", "<|observation|>"]))
    turns, text = TurnFormat.of(reader, TOOLS), f"<tool_call>{call}</tool_call>"
    writer = TextCodec(make_tokenizer(tmp_path / "writer", sorted({*text, *"42"})))
    for source, end in ((writer, ""), (reader, "⟦<|user|>⟧")):
        pool = one_prompt([played(source, 0, [text, "42", "42"])], [trajectory(reader, 1, 0, "7")])
        rules = rules_of((source, reader), turns=turns, max_answer_tokens=99)
        samples, _ = view_by_source(pool, constant(pool), 1, reader, rules)
        own = f"⟦<tool_call>⟧{call}⟦</tool_call>⟧{end}", "⟦<|observation|>⟧", "\n42⟦<|assistant|>⟧\n", "42⟦<|user|>⟧"
        first, header, result, last = map(by_hand.ids, own)
        assert samples[0].answer_ids.tolist() == [*first, *header, *result, *last]
        assert samples[0].target_ids.tolist() == [*first, *([] if end else header), *last]


@pytest.fixture(scope="module")
def thinkers(tmp_path_factory):
    """Codecs whose prompts open <think>, and codecs whose prompts do not, in two tokenizers."""
    folders = [tmp_path_factory.mktemp("thinkers") for _ in range(2)]
    tokenizers = [
        make_tokenizer(folder, (*vocabulary, "<think>", "</think>"))
        for folder, vocabulary in zip(folders, (CHARACTERS, PAIRS), strict=True)
    ]
    return [(TextCodec(t, Prompting(prompt_template="{prompt}<think>")), TextCodec(t)) for t in tokenizers]


@pytest.mark.parametrize("other", [0, 1])
def test_an_answer_crosses_with_the_thinking_that_its_prompt_opened(thinkers, other):
    """Prompt and answer together are the judged text behind the task, for identical and for different tokenizers."""
    (opens, _), (_, plain) = thinkers[0], thinkers[other]
    sources = opens, plain
    texts = ("12</think>3", "5"), ("<think>12</think>3", "5")
    by_agent = [
        [replace(one, token_logprobs=np.zeros(one.num_scored, np.float32)) for one in group]
        for group in ([trajectory(sources[j], j, g, text) for g, text in enumerate(texts[j])] for j in range(2))
    ]
    pool = one_prompt(*by_agent)
    for learner, judged in enumerate((["<think>12</think>3"], ["<think>12</think>3", "<think>5"])):
        codec = sources[learner]
        samples, counts = learner_view(pool, constant(pool), learner, codec, rules_of(sources))
        others = [sample for sample in samples if not sample.is_self]
        whole = [codec.decode_answer([*sample.prompt_ids, *sample.answer_ids]) for sample in others]
        assert whole == [PROMPTS[0].text + text for text in judged]
        assert all(sample.old_logprobs is None and sample.answer_ids[-1] == codec.eos_id for sample in others)
        found = counts.num_cross, counts.num_no_thinking, counts.num_compared, counts.num_reencoded
        assert found == (len(judged), 2 - len(judged), len(judged), len(judged))
        exact = rules_of(sources, needs_same_tokens=True)
        assert learner_view(pool, constant(pool), learner, codec, exact)[1].num_no_thinking == 2
    # Where both prompts open alike, ids of identical tokenizers stay as they were sampled.
    odd = [*opens.encode_answer("1", False), *opens.encode_answer("2</think>3", True)]
    pool = one_prompt([trajectory(opens, 0, 0, "7")], [trajectory(opens, 1, 0, "12</think>3", ids=odd)])
    samples, counts = learner_view(pool, constant(pool), 0, opens, rules_of((opens, opens)))
    assert samples[1].answer_ids.tolist() == odd and (counts.num_compared, counts.num_reencoded) == (0, 0)


@pytest.mark.parametrize("other", [0, 1])
def test_turns_cross_with_the_thinking_that_was_opened_before_each(thinkers, other):
    """The learner's second turn is opened, or not, by what it reads before that turn."""
    (opens, _), (_, plain) = thinkers[0], thinkers[other]
    think = list(opens.encode_answer("<think>", False))
    for texts, opened, learner_opens, read in (
        (["1</think>2", "5", "3</think>4"], ["<think>"] * 2, think, ["1</think>2", "3</think>4"]),
        (["1</think>2", "5", "<think>3</think>4"], ["<think>", ""], think, ["1</think>2", "3</think>4"]),
        (["<think>1</think>2", "5", "34"], ["", ""], [], ["1</think>2", "34"]),
        (["<think>1</think>2", "5", "34"], ["", ""], think, None),
    ):
        source = played(plain, 0, texts)
        said = iter(opened)
        turns = [replace(t, opened=next(said)) if t.is_own else t for t in source.rollout.conversation.turns]
        talk = replace(source.rollout.conversation, turns=tuple(turns))
        assert conversation_of(conversation_text(talk)) == talk
        source = replace(source, rollout=replace(source.rollout, conversation=talk))
        pool = one_prompt([source], [trajectory(opens, 1, 0, "7")])
        continuation = SimpleNamespace(continuation=lambda *_, new=learner_opens, **__: [3, *new])
        rules = rules_of((plain, opens), turns=continuation)
        samples, (counts, _) = view_by_source(pool, constant(pool), 1, opens, rules)
        assert (counts.num_cross, counts.num_no_thinking) == ((1, 0) if read else (0, 1))
        if read:
            first, last = (opens.encode_answer(text, True) for text in read)
            assert samples[0].answer_ids.tolist() == [*first, 3, *learner_opens, *last]


def test_a_segment_is_read_behind_its_history_alone(codecs):
    """The learner writes the history itself: behind the answer's own task, or a task that the history names."""
    heads = []

    def continuation(head, others, *, ended):
        heads.append(list(head))
        return [3]

    source = played(codecs[0], 0, ["12", "5", "3+1", "7", "4"])
    said = History([{"role": "assistant", "content": "12"}, {"role": "tool", "content": "5"}]), History([], "s12=")
    turns = list(source.rollout.conversation.turns)
    turns[1] = replace(turns[1], num_tokens=0)
    turns.insert(2, Turn(HISTORY, said[0].content, 1))
    turns[4] = Turn(HISTORY, said[1].content, 1)
    talk = Conversation((*turns, Turn("tool", "8", 1), Turn("assistant", "9", 2, Stop.EOS)), opening="7")
    ids = np.arange(2, 2 + talk.num_tokens, dtype=np.int32)
    for turn, place in talk.parts():
        ids[place] = codecs[0].encode_answer(turn.content, True) if turn.is_own else 2
    source = replace(source, rollout=replace(source.rollout, token_ids=ids, conversation=talk), num_scored=11)
    assert conversation_of(conversation_text(talk)) == talk and talk.segment_starts.tolist() == [3, 8]
    pool = one_prompt([source], [trajectory(codecs[1], 1, 0, "7")])
    written = []

    def segment(task, opening, messages):
        written.append((task, opening, messages))
        return [4, 4] if messages else [6]

    rules = rules_of(codecs, turns=SimpleNamespace(continuation=continuation, segment=segment))
    samples, _ = view_by_source(pool, constant(pool), 1, codecs[1], rules)
    (sample,) = [sample for sample in samples if sample.source == 0]
    own = [list(codecs[1].encode_answer(text, True)) for text in ("12", "3+1", "4", "9")]
    assert sample.answer_ids.tolist() == [*own[0], 4, 4, *own[1], 6, *own[2], 3, *own[3]]
    starts = [len(own[0]), len(own[0]) + 2 + len(own[1])]
    assert sample.segment_starts.tolist() == starts
    assert written == [(PROMPTS[0].text, "7", said[0].messages), ("s12=", "", [])]
    assert heads == [[6, *own[2]]]
    is_own = [True] * len(own[0]) + [False] * 2 + [True] * len(own[1]) + [False] + [True] * len(own[2])
    is_own += [False] + [True] * len(own[3])
    assert sample.trained_places.tolist() == np.flatnonzero(is_own).tolist()
    own_samples, _ = view_by_source(pool, constant(pool), 0, codecs[0], rules_of(codecs))
    assert own_samples[0].segment_starts.tolist() == [3, 8]


def test_a_prompt_that_a_program_has_written_is_the_one_of_its_answer(codecs):
    """Both agents read the program's text in place of the row's; one that cannot, or has no room, drops the answer."""
    for task, longest, outcome in (
        ("s12=", 100, "num_cross"),
        ("s12=", 2, "num_too_long"),
        ("ä", 100, "num_unencodable"),
    ):
        source = played(codecs[0], 0, ["12+3", "15", "15"])
        talk = replace(source.rollout.conversation, task=task)
        source = replace(source, rollout=replace(source.rollout, conversation=talk))
        assert conversation_of(conversation_text(talk)) == talk
        pool = one_prompt([source], [trajectory(codecs[1], 1, 0, "7")])
        turns = SimpleNamespace(continuation=lambda *_, **__: [3, 4])
        rules = rules_of(codecs, turns=turns, max_prompt_tokens=longest)
        samples, (counts, _) = view_by_source(pool, constant(pool), 1, codecs[1], rules)
        assert getattr(counts, outcome) == 1
        prompts = [sample.prompt_ids.tolist() for sample in samples if sample.source == 0]
        assert prompts == ([list(codecs[1].encode_prompt(task))] if outcome == "num_cross" else [])
