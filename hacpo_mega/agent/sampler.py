"""Generation requests of an agent, and its answers as records: prompt tokens, seeds, lengths.

A pure function of its arguments: no process group, no engine, no clock. So answers do not depend on which rank samples.

Elsewhere: device turns (devices.py), the engine (rollout/engine.py).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any

from hacpo_mega.config import Config
from hacpo_mega.conversations.player import Player
from hacpo_mega.records import Completion, Prompt, Rollout, Stop
from hacpo_mega.rollout.engine import Engine
from hacpo_mega.rollout.vllm.engine_thread import Generate
from hacpo_mega.rollout.vllm.row_noise import answer_seed
from hacpo_mega.samples.tokenizers import TextCodec

AnswerSlot = tuple[Prompt, int]  # prompt, rollout index
NO_STEP = -1  # in the seeds of answers that are no rollouts


@dataclass(frozen=True)
class Requests:
    """One batch of requests to the engines of a cell.

    slots               requested answers, by prompt, then by rollout
    mine                those of this rank's engine
    prompt_ids, seeds   of `mine`
    options             further arguments of `Engine.generate`
    """

    slots: tuple[AnswerSlot, ...]
    mine: tuple[AnswerSlot, ...]
    prompt_ids: list[list[int]]
    seeds: list[int]
    options: dict[str, Any]

    def engine_call(self, engine: Engine, player: Player | None) -> Generate:
        """The call of `engine` that answers the requests; with a `player`, by conversations."""
        if player is None:
            return partial(engine.generate, self.prompt_ids, self.seeds, **self.options)
        return partial(player.play, engine, self.mine, self.seeds, **self.options)


class Sampler:
    """Makes one agent's requests and turns its answers into records."""

    def __init__(self, codec: TextCodec, agent: int, share: slice, config: Config) -> None:
        """`share` selects the requests of a cell that this rank's engine answers; `agent` is the agent's index."""
        self._codec, self._agent, self._share = codec, agent, share
        self._replays = config.agents[agent].router_replay
        self._seed, self._rollout, self._answers_per_prompt = config.seed, config.rollout, config.answers_per_prompt

    def rollout_requests(self, prompts: Sequence[Prompt], step: int) -> Requests:
        """Requests for G sampled answers to each prompt in a step."""
        slots = self.slots(prompts)
        # A seed per answer: with one per batch or rank, another layout would sample other answers.
        seeds = [answer_seed(self._seed, step, prompt.index, g, self._agent) for prompt, g in slots]
        return self._requests(
            slots,
            seeds,
            max_tokens=self._rollout.max_answer_tokens,
            temperature=self._rollout.temperature,
            # The trainer's log-probs are compared with these, or these are the scores.
            return_logprobs=True,
        )

    def single_requests(self, prompts: Sequence[Prompt], max_tokens: int, temperature: float) -> Requests:
        """Requests for one answer to each prompt; temperature 0: greedy. Their seeds are no rollout's."""
        slots = [(prompt, 0) for prompt in prompts]
        seeds = [0] * len(slots)
        if temperature:
            seeds = [answer_seed(self._seed, NO_STEP, prompt.index, 0, self._agent) for prompt in prompts]
        return self._requests(slots, seeds, max_tokens=max_tokens, temperature=temperature)

    def slots(self, prompts: Sequence[Prompt]) -> list[AnswerSlot]:
        """All answers to request for `prompts`, by prompt, then by rollout."""
        return [(prompt, g) for prompt in prompts for g in range(self._answers_per_prompt)]

    def rollouts(
        self,
        slots: Sequence[AnswerSlot],
        completions: Sequence[Completion],
        texts: Mapping[tuple[int, int], str] = MappingProxyType({}),
    ) -> list[Rollout]:
        """Rollouts with their texts; `texts`, by prompt index and rollout index, has those that are decoded already."""
        decoded = (texts.get((prompt.index, g)) for prompt, g in slots)
        return [self.rollout(*answer) for answer in zip(slots, completions, decoded, strict=True)]

    def rollout(self, slot: AnswerSlot, completion: Completion, text: str | None = None) -> Rollout:
        """Rollout of one answer; without its `text`, it is decoded here."""
        (prompt, g), ended = slot, completion.stop is Stop.EOS
        if completion.conversation is not None:
            text = completion.conversation.answer.content
        elif text is None:
            # `stop` represents the final EOS. As text it would be judged, and learners would encode its characters.
            text = self._codec.decode_answer(completion.token_ids[:-1] if ended else completion.token_ids)
        routing = completion.routing if self._replays else None  # a resumed run may have answers with a routing
        logprobs, conversation = completion.logprobs, completion.conversation
        return Rollout(prompt.index, g, completion.token_ids, text, completion.stop, logprobs, routing, conversation)

    def _requests(self, slots: Sequence[AnswerSlot], seeds: Sequence[int], **options: Any) -> Requests:
        mine = tuple(slots[self._share])
        prompt_ids = [self._codec.encode_prompt(prompt.text) for prompt, _ in mine]
        return Requests(tuple(slots), mine, prompt_ids, list(seeds[self._share]), options)
