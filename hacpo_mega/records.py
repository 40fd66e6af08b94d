"""Records that travel between rooms: frozen, and checked on construction.

Prompt -> Rollout (fresh answer) -> Trajectory (judged and scored, as it crosses agents) -> Pool (a lane's full cube)
-> Sample (a trajectory as one learner sees it) -> MicroBatch (packed, see samples/packing.py).
A Rollout may be a Conversation: several own turns of the agent, with an environment's or other agents' between them.
A TokenSequence has the tokens that a model reads and which of them are trained; a Sample adds advantage and ratio.
"""

import json
import math
import operator
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Self, get_args

import numpy as np
import torch

from hacpo_grading.judgement import Judgement as Judgement
from hacpo_grading.judgement import Stop, Verdict


@dataclass(frozen=True)
class Prompt:
    """One task of a step. `index` is its place in the step over all lanes; every agent gets the same `text`.

    `row` is JSON text of its data row without the prompt, for graders and logs; "" where it came from no row.
    """

    index: int
    id: str
    text: str
    gold: str
    skill: str = ""
    row: str = ""


@dataclass(frozen=True)
class Turn:
    """One turn of a conversation. An own turn (role "assistant") is sampled and trained; others are context.

    content      its text; an own turn's without the end token
    num_tokens   its tokens in this agent's encoding. Other turns between two own ones are encoded together: the first
                 has all their tokens, with those that close the own turn before and open the next; the rest have 0
    stop         reason why an own turn ended; None for others, except the last turn of a conversation of several agents
                 if another one wrote it: this agent has not read it (num_tokens 0)
    name         of the tool that answered, or of another agent's role; empty for others
    opened       start of an agent's turn that the prompt before it already contains (a <think>): `content` continues
                 it, and both together are judged
    A turn of the role HISTORY follows the turns of others and begins a segment: its tokens are a prompt of their own,
    and nothing before them is read. Its content is a History as JSON.
    """

    role: str
    content: str
    num_tokens: int
    stop: Stop | None = None
    name: str = ""
    opened: str = ""

    @property
    def message(self) -> dict[str, str]:
        """The turn as a chat message."""
        is_named = self.name and self.role == "tool"
        return {"role": self.role, "content": self.content} | ({"name": self.name} if is_named else {})

    @property
    def is_own(self) -> bool:
        return self.role == "assistant"

    @property
    def is_history(self) -> bool:
        return self.role == HISTORY


HISTORY = "history"


class History(NamedTuple):
    """Prompt of a segment, for agents that write it in tokens of their own.

    messages  turns behind the task, as chat messages
    task      text of the task where it is not that of the conversation's prompt
    """

    messages: list[dict[str, Any]]
    task: str = ""

    @classmethod
    def of(cls, content: str) -> Self:
        """The history of a turn's content. ValueError for any other text."""
        try:
            messages, task = json.loads(content)
            if not all(isinstance(message[key], str) for message in messages for key in ("role", "content")):
                raise TypeError("a message without a role or a text")
            return cls(list(messages), str(task))
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise ValueError(f"no history: {content[:80]!r}: {error}") from error

    @property
    def content(self) -> str:
        return json.dumps(self, ensure_ascii=False)


# Events of a conversation, as its driver and its seats count them (conversations/player.py, seat.py).
EVENTS = (
    *("calls", "call_errors", "unreadable_calls", "truncated"),
    *("failed", "silent", "timeouts", "unencodable", "too_long", "segments", "untrained_segments"),
)


@dataclass(frozen=True)
class Conversation:
    """Turns after the prompt, the first of them the agent's own. One conversation has one reward and one advantage.

    opening  text of others that follows the task in the prompt
    task     text of the prompt where an agent program has written it; "": the row's
    reward   of the environment; None: the judge grades the answer
    counts   EVENTS by name, those that happened; environment_ms, in the environment's code; the name of its failure
    """

    turns: tuple[Turn, ...]
    opening: str = ""
    reward: float | None = None
    counts: Mapping[str, int] = field(default_factory=dict)
    task: str = ""

    def __post_init__(self) -> None:
        assert self.turns and self.turns[0].is_own, self.turns[:1]
        assert all(turn.num_tokens >= 0 and turn.is_own <= (turn.stop is not None) for turn in self.turns)
        assert all(turn.is_own or turn.stop is None for turn in self.turns[:-1]), self.turns
        assert self.reward is None or math.isfinite(self.reward), self.reward

    @property
    def num_tokens(self) -> int:
        return sum(turn.num_tokens for turn in self.turns)

    @property
    def is_settled(self) -> bool:
        """True if no judge is asked: the environment has judged it, or failed, or the agent was not reached."""
        return self.reward is not None or bool({"failed", "silent"} & self.counts.keys())

    @property
    def environment_ms(self) -> int:
        return self.counts.get("environment_ms", 0)

    @property
    def answer(self) -> Turn:
        """The last turn that any agent wrote, which is judged: mostly an own one."""
        return next(turn for turn in reversed(self.turns) if turn.stop is not None)

    def parts(self) -> Iterator[tuple[Turn, slice]]:
        """Every turn with the place of its tokens."""
        start = 0
        for turn in self.turns:
            yield turn, slice(start, start + turn.num_tokens)
            start += turn.num_tokens

    @property
    def segment_starts(self) -> np.ndarray | None:
        """Places of the tokens at which further segments begin, int32; None without one."""
        starts = [place.start for turn, place in self.parts() if turn.is_history]
        return np.array(starts, dtype=np.int32) if starts else None

    def trained_places(self, eos_in_loss: bool) -> np.ndarray:
        """Places of the trained tokens, int32: all of own turns, or all but their end tokens."""
        own = ((turn, place.start) for turn, place in self.parts() if turn.is_own)
        lengths = ((start, trained_tokens(t.num_tokens, t.stop is Stop.EOS, eos_in_loss)) for t, start in own)
        return np.concatenate([np.arange(start, start + length) for start, length in lengths]).astype(np.int32)


def trained_tokens(num_tokens: int, ended: bool, eos_in_loss: bool) -> int:
    """Number of leading answer tokens that the loss trains and the score averages: all, or all but the final EOS."""
    return num_tokens - 1 if ended and not eos_in_loss else num_tokens


@dataclass(frozen=True)
class Completion:
    """One sampled answer, as the engine returns it.

    token_ids   int32 [num_tokens], with the end-of-sequence token if the answer stopped by itself
    stop        reason why it ended
    logprobs    float32 [num_tokens], log-probs of the sampled tokens under the distribution they were sampled from;
                None if not asked for
    routing     experts that each layer chose for every token that was read, those of the prompt first: uint8 or uint16
                [tokens of prompt and answer - 1, layers, experts of a token] (samples/routing.py); None if not asked
                for
    conversation   turns of which the tokens consist, with log-probs of 0 for others'; None: one answer
    """

    token_ids: np.ndarray
    stop: Stop
    logprobs: np.ndarray | None = None
    routing: np.ndarray | None = None
    conversation: Conversation | None = None

    def __post_init__(self) -> None:
        assert (self.token_ids.dtype, self.token_ids.ndim) == (np.int32, 1), self.token_ids
        assert self.logprobs is None or self.logprobs.shape == self.token_ids.shape
        assert self.conversation is None or self.conversation.num_tokens == len(self.token_ids)


@dataclass(frozen=True)
class Rollout:
    """A fresh answer in the tokens of the agent that wrote it.

    `token_ids` is int32 [num_tokens] and keeps the final EOS if there is one; `text` is without special tokens.
    `logprobs` are the engine's of the sampled tokens, float32 nats [num_tokens]; `routing` is as in Completion. Both
    are None if not asked for, and for other agents' answers, with which they do not travel. In a conversation,
    `token_ids` are all tokens after the prompt, and `text` is its answer, which another agent may have written.
    """

    prompt_index: int
    rollout_index: int
    token_ids: np.ndarray
    text: str
    stop: Stop
    logprobs: np.ndarray | None = None
    routing: np.ndarray | None = None
    conversation: Conversation | None = None

    def __post_init__(self) -> None:
        assert self.token_ids.dtype == np.int32 and self.token_ids.ndim == 1, self.token_ids
        assert self.logprobs is None or self.logprobs.shape == self.token_ids.shape, self.logprobs.shape
        assert self.conversation is None or self.conversation.num_tokens == len(self.token_ids)

    def asked(self, prompt: Prompt) -> tuple[str, str]:
        """Text of the answered task, and the opening that follows it in the prompt."""
        if self.conversation is None:
            return prompt.text, ""
        return self.conversation.task or prompt.text, self.conversation.opening

    @property
    def own_turns(self) -> list[tuple[str, Stop, np.ndarray]]:
        """Text, stop and token ids of every own turn; the answer itself where it is no conversation."""
        if self.conversation is None:
            return [(self.text, self.stop, self.token_ids)]
        parts = ((turn, self.token_ids[place]) for turn, place in self.conversation.parts() if turn.is_own)
        return [(turn.content, turn.stop, ids) for turn, ids in parts]

    def trained_places(self, eos_in_loss: bool) -> np.ndarray | None:
        """Places of a conversation's trained tokens, int32; None for one answer, whose leading tokens are trained."""
        return None if self.conversation is None else self.conversation.trained_places(eos_in_loss)

    @property
    def segment_starts(self) -> np.ndarray | None:
        """Places at which further segments of a conversation begin, int32; None without one."""
        return None if self.conversation is None else self.conversation.segment_starts

    def num_trained(self, eos_in_loss: bool) -> int:
        """Number of trained tokens."""
        if self.conversation is not None:
            return len(self.conversation.trained_places(eos_in_loss))
        return trained_tokens(len(self.token_ids), self.stop is Stop.EOS, eos_in_loss)

    def trained_logprobs(self, eos_in_loss: bool) -> np.ndarray:
        """The engine's log-probs of the trained tokens, float32 nats."""
        places = self.trained_places(eos_in_loss)
        return self.logprobs[: self.num_trained(eos_in_loss)] if places is None else self.logprobs[places]


@dataclass(frozen=True)
class Trajectory:
    """A judged and scored rollout.

    `mean_logprob` (fp32 nats) is over the `num_scored` tokens that the source's own loss would train: without the final
    EOS if `eos_in_loss` is off. It is NaN, over 0 tokens, if no agent trains on the answer. `reward` is NaN exactly
    when the answer is unjudged. `engine_weight` multiplies the answer's advantage for every learner
    (algorithm/engine_correction.py): 1 without a correction by sequence. `token_logprobs` are those that `mean_logprob`
    is the mean of, float32 [num_scored], if an objective reads them (algorithm/user_functions.py).
    """

    agent: int
    rollout: Rollout
    verdict: Verdict
    reward: float
    mean_logprob: float
    num_scored: int
    engine_weight: float = 1.0
    token_logprobs: np.ndarray | None = None

    def __post_init__(self) -> None:
        assert self.verdict.allows(self.reward), (self.verdict, self.reward)
        assert 0 <= self.num_scored <= len(self.rollout.token_ids), self.num_scored
        assert self.token_logprobs is None or self.token_logprobs.shape == (self.num_scored,), self.num_scored

    @property
    def is_judged(self) -> bool:
        return not math.isnan(self.reward)


@dataclass(frozen=True)
class Pool:
    """All answers to a lane's prompts: trajectories_PNG[p][n][g] for prompt p, agent n, rollout g."""

    prompts: tuple[Prompt, ...]
    trajectories_PNG: tuple[tuple[tuple[Trajectory, ...], ...], ...]

    def __post_init__(self) -> None:
        sizes = {(len(by_agent), len(group)) for by_agent in self.trajectories_PNG for group in by_agent}
        assert len(self.prompts) == len(self.trajectories_PNG) and len(sizes) == 1, sizes

    def part(self, share: slice) -> "Pool":
        """Pool of some of the prompts."""
        return Pool(self.prompts[share], self.trajectories_PNG[share])

    @property
    def engine_weights_PNG(self) -> torch.Tensor:
        """`engine_weight` of every answer, float64 [P, N, G]."""
        return torch.tensor(
            [[[t.engine_weight for t in group] for group in by_agent] for by_agent in self.trajectories_PNG],
            dtype=torch.float64,
        )


@dataclass(frozen=True)
class TokenSequence:
    """A prompt and its answer in the tokens of the model that reads them: input of scoring.

    prompt_ids, answer_ids    int32; answer_ids keeps a final EOS if the answer ended by itself
    num_trained               number of answer tokens that count
    trained_places            their places in the answer, rising, int32 [num_trained]; None: the leading ones (all, or
                              all but the final EOS)
    segment_starts            places in the answer at which a further segment begins, rising, int32; None: one segment
    routing                   experts of these tokens, as in Completion; None: the model's router decides
    """

    prompt_ids: np.ndarray
    answer_ids: np.ndarray
    num_trained: int
    trained_places: np.ndarray | None = field(default=None, kw_only=True)
    segment_starts: np.ndarray | None = field(default=None, kw_only=True)
    routing: np.ndarray | None = field(default=None, kw_only=True)

    @property
    def num_needed(self) -> int:
        """Number of leading answer tokens up to the last one that counts."""
        if self.trained_places is None or not self.num_trained:
            return self.num_trained
        return int(self.trained_places[-1]) + 1

    @property
    def target_ids(self) -> np.ndarray:
        """Answer tokens that count."""
        return (
            self.answer_ids[: self.num_trained] if self.trained_places is None else self.answer_ids[self.trained_places]
        )

    def __post_init__(self) -> None:
        assert self.trained_places is None or len(self.trained_places) == self.num_trained, self.trained_places
        num_read = len(self.prompt_ids) + len(self.answer_ids) - 1
        assert self.routing is None or len(self.routing) == num_read, (self.routing.shape, num_read)
        assert self.routing is None or self.segment_starts is None, "a routing is of one segment"
        assert len(self.prompt_ids) >= 1, "an answer is predicted from at least one prompt token"
        assert 0 <= self.num_trained <= len(self.answer_ids), (self.num_trained, len(self.answer_ids))


@dataclass(frozen=True)
class Score:
    """An actor's log-probs of an answer, in nats, and its weights for engine-trainer mismatch (engine_correction.py).

    mean_logprob      over its trained tokens, rounded to fp32; 0 without a trained token
    token_logprobs    the log-probs it is the mean of, float32 [num_trained]
    engine_weight     of the answer; 1 unless rollout.engine_correction is "sequence"
    token_weights     float32 [num_trained]; None unless it is "token"
    """

    mean_logprob: float
    token_logprobs: np.ndarray
    engine_weight: float = 1.0
    token_weights: np.ndarray | None = None

    def __post_init__(self) -> None:
        assert (self.token_logprobs.dtype, self.token_logprobs.ndim) == (np.float32, 1), self.token_logprobs
        assert self.token_weights is None or self.token_weights.shape == self.token_logprobs.shape


@dataclass(frozen=True)
class Sample(TokenSequence):
    """A trajectory as one learner sees it: its own tokens, its own advantage.

    advantage         omega already applied (HACPO, eq. 10 and 50)
    source_logprob    the source's mean log-prob (nats), constant in the loss; None for own answers that the first
                      update scores (agent.py)
    length            token count that divides the learner's log-prob sum (`ratio_length`)
    token_weights     own answers, with engine correction by token: factor of each trained token's gradient, float32
                      [num_trained]; None scales none
    old_logprobs      log-prob of each trained token under the source's actor before the step's first update, float32
                      [num_trained] nats; None without a score, for answers whose source has other tokens, and for all
                      others' answers unless an objective reads them
    """

    source: int
    is_self: bool
    prompt_index: int
    rollout_index: int
    advantage: float
    source_logprob: float | None
    length: float
    old_logprobs: np.ndarray | None = None
    token_weights: np.ndarray | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        for per_token in (self.old_logprobs, self.token_weights):
            assert per_token is None or per_token.shape == (self.num_trained,), (per_token.shape, self.num_trained)


DropReason = Literal[
    "zero_advantage",
    "unjudged",
    "no_token",
    "too_long",
    "undecodable",
    "unencodable",
    "changed",
    "control_tokens",
    "no_thinking",
    "not_finite",
]
DROP_REASONS: tuple[DropReason, ...] = get_args(DropReason)


class DroppedAnswer(NamedTuple):
    """An answer of one source that a learner does not train on, and the reason (ReencodingCounts)."""

    prompt_index: int
    rollout_index: int
    reason: DropReason


@dataclass(frozen=True)
class ReencodingCounts:
    """Counts of a pool's answers after re-encoding: `num_own` + `num_cross` are trained on, the rest by reason.

    Others' answers are dropped if unjudged, too long, unencodable, and
    num_control_tokens   if they hold a control token of the learner before their end: the text spells one out
    num_changed          if their re-encoding decodes to another text (trained on with
                         rollout.train_changed_reencodings)
    num_undecodable      if their text does not show what was sampled: an id without a token, a control token before the
                         end, half a character. Own ones are counted too, and trained on; half a character also where
                         the learner has the source's tokenizer and takes its ids
    num_no_thinking      if they do not begin with the thinking that the learner's prompt opens (a <think>), or the
                         prompts of both open otherwise and a ratio per token needs the source's own tokens
    num_not_finite       if their log-prob under their source is not finite, since the source's weights are broken
    num_zero_advantage   if they would change no gradient: neither scored nor trained, own ones too

    `num_compared` answers were decoded again after encoding; `num_changed` of them differ. `token_ratio_sum` adds up
    learner's tokens / source's tokens over the `num_reencoded` answers that are trained on. Counts of parts of a pool
    add up (`+`). `dropped` names every answer that is not trained on, for one reason each: also others' without
    a token to train, "no_token", which no count has. `num_empty` trained ones have no text, and `num_truncated` did not
    end by themselves. Comparisons look at the counts alone.
    """

    num_own: int = 0
    num_cross: int = 0
    num_zero_advantage: int = 0
    num_unjudged: int = 0
    num_too_long: int = 0
    num_unencodable: int = 0
    num_control_tokens: int = 0
    num_no_thinking: int = 0
    num_empty: int = 0
    num_truncated: int = 0
    num_undecodable: int = 0
    num_compared: int = 0
    num_reencoded: int = 0
    num_changed: int = 0
    num_not_finite: int = 0
    token_ratio_sum: float = 0.0
    dropped: tuple[DroppedAnswer, ...] = field(default=(), compare=False)

    def __add__(self, other: "ReencodingCounts") -> "ReencodingCounts":
        return ReencodingCounts(*map(operator.add, vars(self).values(), vars(other).values()))


@dataclass(frozen=True)
class MicroBatch:
    """Sequences packed end to end (THD, no padding between them), as tensors on the CPU.

    T tokens in S segments (parts of sequences; prompts that several share; answers to these), B sequences, R trained
    rows.
    tokens_T, positions_T        int64; a tail of padding tokens (its own segment, nothing trained) may round T up
    cu_seqlens                   int32 [S + 1]: starts of segments, and T
    prefixes_S2                  int32 [S, 2]: start and length of the tokens that each segment sees before its own
    rows_R, targets_R            int64: hidden state rows_R[i] predicts token targets_R[i]
    row_cu_seqlens_B             int32 [B + 1]: rows of sequence b are row_cu_seqlens_B[b]:row_cu_seqlens_B[b + 1]
    sequences, num_tokens        the sequences, in packed order; T without the tail
    routing_TLK                  int16: the K experts of each layer, -1 where its router decides; None: it always does
    """

    tokens_T: torch.Tensor
    positions_T: torch.Tensor
    cu_seqlens: torch.Tensor
    prefixes_S2: torch.Tensor
    rows_R: torch.Tensor
    targets_R: torch.Tensor
    row_cu_seqlens_B: torch.Tensor
    sequences: tuple[TokenSequence, ...]
    num_tokens: int
    routing_TLK: torch.Tensor | None = None


@dataclass(frozen=True)
class ExpertLoad:
    """Balance of an update's tokens over experts, a mean over layers.

    fullest_share   share of (token, expert) pairs that the fullest expert has: 1/E if uniform
    entropy         normalised entropy of the shares over experts: 1 if uniform
    changed         of the replayed pairs, the share that the router had not chosen; None if none was replayed
    aux_loss, z_loss    the auxiliary losses, also a mean over tokens (megatron/model/router.py); None: switched off
    """

    fullest_share: float
    entropy: float
    changed: float | None = None
    aux_loss: float | None = None
    z_loss: float | None = None


@dataclass(frozen=True)
class UpdateStats:
    """One optimizer update as this cell saw it; equal on all ranks of the cell.

    reports      of the loss function, one per micro-batch of this cell, tensors on the CPU
    loss         of the whole update, over all cells
    grad_norm    of the whole model and the whole update, before clipping; lr the rate it was applied with
    skipped      True if the loss or the norm was not finite, and the parameters stayed unchanged
    num_*        of this cell: num_tokens the model read, num_trained those whose log-prob the loss used; no padding
    experts      over all cells; None for a model without experts, or an update without samples
    """

    reports: tuple[Any, ...]
    loss: float
    grad_norm: float
    lr: float
    skipped: bool
    num_microbatches: int
    num_samples: int
    num_tokens: int
    num_trained: int
    experts: ExpertLoad | None = None
