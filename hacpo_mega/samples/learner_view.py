"""Re-encoding of a lane's pool for one learner: own tokens, own prompt, own advantage (eq. 47 and 50 sum over these).

Own answers keep the ids that were sampled: re-encoding would train on tokens that were not sampled. Answers of a source
with the identical tokenizer keep theirs, too, except for a final EOS that is no end token of the learner's (a base
model and its instruct twin may differ in that one token). Other answers are encoded from text as a continuation of a
prompt, and end with the learner's own end token (models/files/answer_ends.py).
The judged object is the text, with a <think> that its prompt has opened. It crosses without what the learner's own
prompt opens. An answer is dropped, and counted, if its text is not what the source sampled (an id without a token, a
control token inside it, half a character) or not what the learner would train on (its encoding holds a control token,
or decodes to another text, or the text does not begin as the learner's prompt does).

Elsewhere: the advantages (algorithm/), the split into updates (packing.py).
"""

import itertools
import math
import operator
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, Protocol, Self

import numpy as np
import torch

from hacpo_mega.config import Config
from hacpo_mega.config.checks.tokenizer_checks import several_tokenizers
from hacpo_mega.records import (
    Conversation,
    DroppedAnswer,
    DropReason,
    History,
    Pool,
    Prompt,
    ReencodingCounts,
    Rollout,
    Sample,
    Score,
    Stop,
    Trajectory,
    Turn,
    trained_tokens,
)
from hacpo_mega.samples.tokenizers import TextCodec

REPLACEMENT = "\ufffd"

AnswerKey = tuple[int, int]  # prompt index, rollout index: an answer of one agent


class TurnWriter(Protocol):
    """An agent's tokens of turns that it did not say (conversations/turn_format.py). ValueError for what has none."""

    def continuation(self, head: Sequence[int], others: Sequence[dict[str, Any]], *, ended: bool) -> list[int]: ...
    def segment(self, task: str, opening: str, messages: Sequence[dict[str, Any]]) -> list[int]: ...


@dataclass(frozen=True)
class ReencodingRules:
    """Rules by which a learner re-encodes the answers of a pool.

    sources             per source agent: its tokenizer; one with the learner's fingerprint has the same ids
    shares_answers      whether answers of other agents are trained on at all
    trains_changed      whether an answer is trained on though its re-encoding decodes to another text
    eos_in_loss         whether the final EOS is a trained token
    ratio_length        divisor of the learner's log-prob sum: its own token count, or the source's
    max_answer_tokens   a re-encoded answer of more tokens is dropped, never cut: its ending was judged, too
    max_prompt_tokens   a longer prompt, made by an environment or a program, drops its answer, too
    turns               writes others' turns in the learner's tokens; None without conversations
    needs_same_tokens   whether an answer is dropped if it is not trained on in the tokens that its source sampled
    """

    sources: tuple[TextCodec, ...]
    shares_answers: bool
    trains_changed: bool
    eos_in_loss: bool
    ratio_length: Literal["own", "source"]
    max_answer_tokens: int
    max_prompt_tokens: int
    turns: TurnWriter | None = None
    needs_same_tokens: bool = False

    @classmethod
    def of(cls, config: Config, sources: tuple[TextCodec, ...], turns: TurnWriter | None = None) -> Self:
        """Rules from a configuration. ValueError if its method needs one tokenizer, and there are several."""
        algorithm, rollout = config.algorithm, config.rollout
        if algorithm.needs_one_tokenizer and len({source.fingerprint for source in sources}) > 1:
            raise ValueError(several_tokenizers([agent.name for agent in config.agents]))
        return cls(
            sources=sources,
            shares_answers=algorithm.shares_answers,
            trains_changed=rollout.train_changed_reencodings,
            eos_in_loss=algorithm.eos_in_loss,
            ratio_length=algorithm.ratio_length,
            max_answer_tokens=config.longest_rollout,
            max_prompt_tokens=rollout.max_prompt_tokens,
            turns=turns,
            needs_same_tokens=algorithm.needs_one_tokenizer,
        )


class EncodedAnswer(NamedTuple):
    """An answer in the learner's tokens, int32, and the places of the trained ones; None: the leading `num_trained`.

    starts      as TokenSequence.segment_starts
    is_sampled  whether the trained ones, end tokens aside, are those that another agent sampled
    """

    ids: np.ndarray
    num_trained: int
    places: np.ndarray | None = None
    starts: np.ndarray | None = None
    is_sampled: bool = False


def scores_by_answer(rollouts: Sequence[Rollout], scores: Sequence[Score | None]) -> dict[AnswerKey, Score]:
    """Scores of a cell's own rollouts, by answer; only those that have one."""
    keys = [(rollout.prompt_index, rollout.rollout_index) for rollout in rollouts]
    return {key: score for key, score in zip(keys, scores, strict=True) if score is not None}


def routing_by_answer(rollouts: Sequence[Rollout]) -> dict[AnswerKey, np.ndarray]:
    """Routing of a cell's own rollouts, by answer; only those that have one."""
    return {(r.prompt_index, r.rollout_index): r.routing for r in rollouts if r.routing is not None}


def learner_view(
    pool: Pool,
    advantages_PNG: torch.Tensor,
    trains_PNG: torch.Tensor,
    learner: int,
    codec: TextCodec,
    rules: ReencodingRules,
    own_scores: Mapping[AnswerKey, Score],
    own_routing: Mapping[AnswerKey, np.ndarray] = MappingProxyType({}),
    mine_PNG: np.ndarray | None = None,
) -> tuple[list[Sample], tuple[ReencodingCounts, ...]]:
    """Samples of `learner`, ordered by (prompt, source, rollout), and counts of each source's answers [N].

    `advantages_PNG` [P, N, G] has omega applied already; it may be NaN where an answer is unjudged. `trains_PNG`, bool
    [P, N, G], marks the answers worth training on (algorithm/dynamic_groups.py). `codec` is the learner's.
    `own_scores` holds the learner's own answers in this pool: their token log-probs stay in the cell, only the mean of
    an answer travels. A missing one is computed by the update that trains it. `own_routing` is keyed likewise.
    `mine_PNG`, bool [P, N, G], are the answers that this cell trains; None: all.
    """
    tallies: tuple[Counter[str], ...] = tuple(Counter() for _ in rules.sources)
    dropped: tuple[list[DroppedAnswer], ...] = tuple([] for _ in rules.sources)
    samples = []
    trains, advantages = trains_PNG.tolist(), advantages_PNG.tolist()  # indexing a tensor one by one is slow
    is_mine_PNG = np.full(trains_PNG.shape, True) if mine_PNG is None else mine_PNG
    encoded = _encoded_texts(pool, (trains_PNG.numpy() & is_mine_PNG).tolist(), learner, codec, rules)
    mine = is_mine_PNG.tolist()
    for p, prompt in enumerate(pool.prompts):
        for j, group in enumerate(pool.trajectories_PNG[p]):
            is_self = j == learner
            if not is_self and not rules.shares_answers:
                continue
            for g, trajectory in enumerate(group):
                if not mine[p][j][g]:
                    continue
                key = prompt.index, trajectory.rollout.rollout_index
                answer = _reason_not_wanted(trajectory, trains[p][j][g], tallies[j])
                if answer is None:
                    prompt_ids = _prompt_ids(prompt, trajectory, codec)
                    asked = trajectory.rollout.asked(prompt)
                    answer = _answer(trajectory, is_self, asked, prompt_ids, codec, rules, encoded, tallies[j])
                if isinstance(answer, str):
                    dropped[j].append(DroppedAnswer(*key, answer))
                    continue
                advantage = advantages[p][j][g] if trajectory.is_judged else 0.0
                own = (own_scores.get(key), own_routing.get(key)) if is_self else (None, None)
                sample = _sample(prompt, prompt_ids, trajectory, answer, advantage, is_self, *own, rules)
                if answer.is_sampled and trajectory.num_scored == sample.num_trained:
                    sample = replace(sample, old_logprobs=trajectory.token_logprobs)
                samples.append(sample)
    return samples, tuple(ReencodingCounts(**tally, dropped=tuple(left)) for tally, left in zip(tallies, dropped))


def _prompt_ids(prompt: Prompt, trajectory: Trajectory, codec: TextCodec) -> np.ndarray | None:
    """The prompt in the learner's tokens; None if text of an environment or a program cannot be encoded."""
    asked = trajectory.rollout.asked(prompt)
    try:
        return np.array(codec.encode_prompt(*asked), dtype=np.int32)
    except ValueError:
        if asked == (prompt.text, ""):
            raise  # every prompt was tried before the run
        return None


def _reason_not_wanted(trajectory: Trajectory, trains: bool, tally: Counter[str]) -> DropReason | None:
    """Reason why an answer is not worth training on for any learner, counted; None if it is."""
    if trains:
        return None
    reason: DropReason = "zero_advantage" if trajectory.is_judged else "unjudged"
    tally[f"num_{reason}"] += 1
    return reason


class Reencoding(NamedTuple):
    """A text in the learner's tokens, and the text that these decode to.

    ids    None if the text cannot be encoded
    text   None if `ids` is, or has a control token: a reason of its own to drop the answer
    """

    ids: tuple[int, ...] | None
    text: str | None


def _encoded_texts(
    pool: Pool, trains: list[list[list[bool]]], learner: int, codec: TextCodec, rules: ReencodingRules
) -> dict[str, Reencoding]:
    """Reads each text that the learner may take from other tokens: all at once, equal ones once.

    Turns that are not opened as their prompt is are read later, one by one.
    """
    others = [(j, source) for j, source in enumerate(rules.sources) if j != learner and rules.shares_answers]
    texts: dict[str, None] = {}
    for prompt, trains_NG, group_N in zip(pool.prompts, trains, pool.trajectories_PNG, strict=True):
        for j, source in others:
            opened = Opened(source.opened_thinking(prompt.text), codec.opened_thinking(prompt.text))
            if opened.are_equal and _shares_ids(source, codec):
                continue
            wanted = (t.rollout for t, is_trained in zip(group_N[j], trains_NG[j], strict=True) if is_trained)
            found = (opened.shared(text) for rollout in wanted for text, *_ in rollout.own_turns)
            texts |= {text: None for text in found if text is not None and REPLACEMENT not in text}
    return _encode_texts(list(texts), codec)


def _encode_texts(texts: Sequence[str], codec: TextCodec) -> dict[str, Reencoding]:
    """Encodes and decodes texts."""
    ids = codec.encode_answers(texts, torch.get_num_threads())
    is_plain = [one is not None and codec.control_ids.isdisjoint(one) for one in ids]
    decoded = [codec.decode_answer(one) if plain else None for one, plain in zip(ids, is_plain)]
    return dict(zip(texts, map(Reencoding, ids, decoded)))


class Opened(NamedTuple):
    """Start of a turn (a <think>) that the prompt before it contains, in its source's prompt and in the learner's."""

    source: str
    learner: str

    @property
    def are_equal(self) -> bool:
        return self.source == self.learner

    def shared(self, text: str) -> str | None:
        """The learner's part of a turn; None if the judged text does not begin with what its prompt opens."""
        judged = self.source + text
        return judged[len(self.learner) :] if judged.startswith(self.learner) else None


def _shares_ids(source: TextCodec, codec: TextCodec) -> bool:
    """True if both have the same tokenizer, end tokens aside."""
    return source.fingerprint == codec.fingerprint


def _answer(
    trajectory: Trajectory,
    is_self: bool,
    asked: tuple[str, str],
    prompt_ids: np.ndarray | None,
    codec: TextCodec,
    rules: ReencodingRules,
    encoded: Mapping[str, Reencoding],
    tally: Counter[str],
) -> EncodedAnswer | DropReason:
    """The answer in the learner's tokens, or the reason why it is not trained on; counts it."""
    rollout = trajectory.rollout
    tally["num_unjudged"] += not trajectory.is_judged
    # An unjudged own answer stays, with advantage 0: without it the others would be packed differently from when they
    # were scored, and their first ratio would no longer be exactly 1.
    if not trajectory.is_judged and not is_self:
        return "unjudged"
    # A source with broken weights must not block a sound learner. An own answer like that stays: its update is skipped,
    # and too many skipped updates end the run (logbook/steps/skipped_updates.py).
    if not is_self and not _is_finite(trajectory):
        tally["num_not_finite"] += 1
        return "not_finite"
    if prompt_ids is None:
        tally["num_unencodable"] += 1
        return "unencodable"
    source, turns = rules.sources[trajectory.agent], rollout.own_turns
    is_shown = all(source.shows(_sampled(stop, ids)) for _, stop, ids in turns)
    tally["num_undecodable"] += not is_shown or any(REPLACEMENT in text for text, *_ in turns)
    answer: EncodedAnswer | DropReason
    if is_self:
        places = rollout.trained_places(rules.eos_in_loss)
        num_trained = rollout.num_trained(rules.eos_in_loss)
        answer = EncodedAnswer(rollout.token_ids, num_trained, places, rollout.segment_starts)
    else:  # also with the learner's tokenizer: its model may have no row for an id without a token
        counts = Counter[str]()
        answer = _reencode(trajectory, asked, prompt_ids, codec, rules, encoded, counts) if is_shown else "undecodable"
        # An answer is counted once as compared and as changed, however many turns it has.
        once = {name: min(1, counts[name]) for name in ("num_compared", "num_changed")}
        tally.update({**counts, **once})
    if not isinstance(answer, str):
        tally["num_own" if is_self else "num_cross"] += 1
        tally["num_empty"] += rollout.text == ""
        tally["num_truncated"] += rollout.stop != Stop.EOS
    return answer


def _is_finite(trajectory: Trajectory) -> bool:
    return trajectory.num_scored == 0 or math.isfinite(trajectory.mean_logprob + trajectory.engine_weight)


def _sampled(stop: Stop, ids: np.ndarray) -> np.ndarray:
    return ids[:-1] if stop == Stop.EOS else ids


def _reencode(
    trajectory: Trajectory,
    asked: tuple[str, str],
    prompt_ids: np.ndarray,
    codec: TextCodec,
    rules: ReencodingRules,
    encoded: Mapping[str, Reencoding],
    tally: Counter[str],
) -> EncodedAnswer | DropReason:
    """Another agent's answer or conversation in the learner's tokens: its turns encoded, the others' rendered anew."""
    rollout, source = trajectory.rollout, rules.sources[trajectory.agent]
    shares_ids = _shares_ids(source, codec)
    own = partial(_turn_ids, shares_ids=shares_ids, codec=codec, rules=rules, encoded=encoded, tally=tally)
    answer: EncodedAnswer | DropReason
    if rollout.conversation is None:
        opened = Opened(*(reader.opened_thinking(asked[0]) for reader in (source, codec)))
        ids = own(*rollout.own_turns[0], opened)
        if isinstance(ids, str):
            return ids
        num_trained = trained_tokens(len(ids), rollout.stop == Stop.EOS, rules.eos_in_loss)
        answer = EncodedAnswer(ids, num_trained, is_sampled=shares_ids and opened.are_equal)
    else:
        try:
            answer = _conversation(trajectory, own, asked, prompt_ids, codec, rules)
        except ValueError:  # the learner has no token for what another said
            tally["num_unencodable"] += 1
            return "unencodable"
        if isinstance(answer, str):
            return answer
    if not answer.num_trained:  # without eos_in_loss an empty answer, which no micro-batch has
        return "no_token"
    if rollout.conversation is None and answer.is_sampled:
        return answer
    if len(answer.ids) > rules.max_answer_tokens or len(prompt_ids) > rules.max_prompt_tokens:
        tally["num_too_long"] += 1
        return "too_long"
    tally["num_reencoded"] += not answer.is_sampled
    tally["token_ratio_sum"] += 0.0 if answer.is_sampled else len(answer.ids) / max(1, len(rollout.token_ids))
    return answer


def _conversation(
    trajectory: Trajectory,
    own: Callable[[str, Stop, np.ndarray, Opened], np.ndarray | DropReason],
    asked: tuple[str, str],
    prompt_ids: np.ndarray,
    codec: TextCodec,
    rules: ReencodingRules,
) -> EncodedAnswer | DropReason:
    """A conversation with own turns read by `own`, or the reason why `own` drops one.

    ValueError for a text that has no token.
    """
    rollout, ids = trajectory.rollout, list[int]()
    prompt = prompt_ids.tolist()
    start = 0  # of the segment in `ids`; `prompt` precedes it, unless `ids` has its prompt
    turns, rest = list[Turn](), iter(rollout.own_turns)
    shares_ids = is_sampled = _shares_ids(rules.sources[trajectory.agent], codec)
    visible = (turn for turn in rollout.conversation.turns if turn.is_own or turn.stop is None)
    for is_own, group in itertools.groupby(visible, key=operator.attrgetter("is_own")):
        for turn in group if is_own else ():
            opened = Opened(turn.opened, codec.opened_before(asked[0], [*prompt, *ids[start:]]))
            text, stop, token_ids = next(rest)
            turn_ids = own(text, stop, token_ids, opened)
            if isinstance(turn_ids, str):
                return turn_ids
            ids += turn_ids.tolist()
            is_sampled &= opened.are_equal
            turns.append(replace(turn, num_tokens=len(turn_ids)))
        if not is_own:
            others = list(group)
            if others[-1].is_history:
                history = History.of(others[-1].content)
                task = (history.task, "") if history.task else asked
                new = rules.turns.segment(*task, history.messages)
                prompt, start = [], len(ids)
            else:
                ended, messages = turns[-1].stop is Stop.EOS, [turn.message for turn in others]
                new = rules.turns.continuation([*prompt, *ids[start:]], messages, ended=ended)
                if ended and not (shares_ids and ids[-1] == token_ids[-1]):
                    ids[-1], new = _with_own_end([*prompt, *ids[start:]], new, messages, codec, rules.turns)
            ids += new
            turns.append(Turn(others[-1].role, "", len(new)))
    read = Conversation(tuple(turns))
    places = read.trained_places(rules.eos_in_loss)
    return EncodedAnswer(np.array(ids, dtype=np.int32), len(places), places, read.segment_starts, is_sampled)


def _with_own_end(
    head: list[int], new: list[int], messages: Sequence[dict[str, Any]], codec: TextCodec, turns: TurnWriter
) -> tuple[int, list[int]]:
    """The end token of the turn that `head` ends with, and what follows it.

    An end may be the first token of what follows, such as of a tool's result (GLM). Then `new`, the continuation behind
    another end, begins with it, and goes on behind it alike.
    """
    if new and new[0] in codec.ends.ids:
        behind = turns.continuation([*head[:-1], new[0]], messages, ended=True)
        if behind == new[1:]:
            return new[0], behind
    return head[-1], new


def _turn_ids(
    text: str,
    stop: Stop,
    token_ids: np.ndarray,
    opened: Opened,
    shares_ids: bool,
    codec: TextCodec,
    rules: ReencodingRules,
    encoded: Mapping[str, Reencoding],
    tally: Counter[str],
) -> np.ndarray | DropReason:
    """One turn of another agent in the learner's tokens, or the reason for dropping the answer."""
    text_ids: Sequence[int] | DropReason
    if shares_ids and opened.are_equal:
        text_ids = _sampled(stop, token_ids).tolist()
    elif (shared := opened.shared(text)) is None or (rules.needs_same_tokens and not opened.are_equal):
        tally["num_no_thinking"] += 1
        return "no_thinking"
    else:
        text_ids = _reencoded_text(shared, codec, encoded, rules, tally)
    if isinstance(text_ids, str):
        return text_ids
    if not codec.control_ids.isdisjoint(text_ids):
        tally["num_control_tokens"] += 1
        return "control_tokens"
    end = [_end_token(int(token_ids[-1]), codec, shares_ids)] if stop == Stop.EOS else []
    return np.array([*text_ids, *end], dtype=np.int32)


def _end_token(own: int, codec: TextCodec, shares_ids: bool) -> int:
    """The learner's end token for another agent's answer; a twin's own end token if it is one of the learner's, too."""
    return own if shares_ids and own in codec.ends.ids else codec.eos_id


def _reencoded_text(
    text: str, codec: TextCodec, encoded: Mapping[str, Reencoding], rules: ReencodingRules, tally: Counter[str]
) -> tuple[int, ...] | DropReason:
    """The text in the learner's tokens, or the reason for dropping it."""
    if REPLACEMENT in text:
        return "undecodable"
    ids, decoded = encoded.get(text) or _encode_texts([text], codec)[text]
    if ids is None:
        tally["num_unencodable"] += 1
        return "unencodable"
    is_changed = decoded is not None and decoded != text
    tally["num_compared"] += decoded is not None
    tally["num_changed"] += is_changed
    return "changed" if is_changed and not rules.trains_changed else ids


def _sample(
    prompt: Prompt,
    prompt_ids: np.ndarray,
    trajectory: Trajectory,
    answer: EncodedAnswer,
    advantage: float,
    is_self: bool,
    own: Score | None,
    routing: np.ndarray | None,
    rules: ReencodingRules,
) -> Sample:
    rollout = trajectory.rollout
    num_trained = answer.num_trained
    # an own ratio is only 1 before the first update if both sides average over the same tokens
    assert own is None or num_trained == trajectory.num_scored, (num_trained, trajectory.num_scored)
    is_scored = own is not None or not is_self
    # NaN over no token means that no agent wanted the answer; NaN over some tokens comes from a broken model.
    was_wanted = trajectory.num_scored > 0 or not math.isnan(trajectory.mean_logprob)
    assert was_wanted or not is_scored, (prompt, trajectory.agent, rollout.rollout_index)
    assert math.isfinite(advantage) or not _is_finite(trajectory), (prompt, trajectory.agent, rollout.rollout_index)
    length = num_trained if is_self or rules.ratio_length == "own" else trajectory.num_scored
    return Sample(
        source=trajectory.agent,
        is_self=is_self,
        prompt_index=prompt.index,
        rollout_index=rollout.rollout_index,
        prompt_ids=prompt_ids,
        answer_ids=answer.ids,
        num_trained=num_trained,
        trained_places=answer.places,
        segment_starts=answer.starts,
        advantage=advantage,
        source_logprob=trajectory.mean_logprob if is_scored else None,
        length=float(max(1, length)),  # an answer without a trained token has mean 0 / 1
        old_logprobs=None if own is None else own.token_logprobs,
        token_weights=None if own is None else own.token_weights,
        routing=routing,
    )
