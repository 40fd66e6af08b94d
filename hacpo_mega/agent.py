"""One agent on this rank: tokenizer, Megatron actor, live vLLM engine.

It rolls out, scores, learns, and publishes its weights.

Every rank of a cell calls every method with equal arguments; what a method returns is equal on all of them.
Not here: other agents (trainer.py exchanges with them) and what an advantage is (algorithm/).
"""

import struct
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from hacpo_mega.algorithm import sample_weight
from hacpo_mega.cluster.place import Place, gather_bytes
from hacpo_mega.config import AgentConfig, Config
from hacpo_mega.megatron.actor import Actor
from hacpo_mega.policy_loss import PolicyLoss, SampleKey
from hacpo_mega.records import Prompt, Rollout, Sample, Stop, UpdateStats
from hacpo_mega.rollout.engine import Completion, Engine, answer_seed
from hacpo_mega.samples.learner_view import trained_tokens
from hacpo_mega.samples.packing import plan_updates
from hacpo_mega.samples.tokenizers import TextCodec, load_tokenizer


class Agent:
    """The agent whose ranks include this one."""

    def __init__(self, spec: AgentConfig, place: Place, config: Config) -> None:
        """Loads the model twice: into Megatron, and from Megatron into vLLM. Collective over the agent's ranks."""
        self.name = spec.name
        self.index = place.agent
        self.place = place
        self.codec = TextCodec(load_tokenizer(spec.model, spec.trust_remote_code), spec.prompting)
        self._seed = config.seed
        self._rollout = config.rollout
        self._algorithm = config.algorithm
        self._prompts_per_update = config.training.prompts_per_update
        self._cells = config.lanes * spec.cells_per_lane
        self._engines_per_cell = place.rank_map.agents[place.agent].engines_per_cell
        num_updates = config.training.prompts_per_step // config.training.prompts_per_update
        self.actor = Actor(
            spec.model,
            tp=spec.tp,
            pp=spec.pp,
            optimizer=spec.optimizer,
            total_updates=num_updates * config.num_steps,
            max_positions=config.rollout.max_prompt_tokens + config.longest_answer,
            max_tokens_per_microbatch=config.training.max_tokens_per_microbatch,
            temperature=config.rollout.temperature,
            seed=config.seed,
            overrides=spec.megatron,
        )
        if config.algorithm.kl_coef > 0.0:
            self.actor.keep_reference()
        self.engine = Engine(
            spec.model,
            max_model_len=config.rollout.max_prompt_tokens + config.longest_answer,
            dtype=self.actor.model.config.params_dtype,
            tensor_parallel_size=spec.engine_tensor_parallel,
            seed=config.seed,
            trust_remote_code=spec.trust_remote_code,
            random_weights=True,
            options=spec.vllm,
        )
        self._engine_sleeps = False
        self.publish_weights()
        self._weight = sample_weight(
            self._prompts_per_update, config.rollout.rollouts_per_prompt, len(config.agents), config.algorithm
        )

    def my_prompts(self, lane_prompts: Sequence[Prompt]) -> tuple[Prompt, ...]:
        """The prompts that this cell answers and trains: every cells_per_lane-th of its lane's."""
        cells_per_lane = self.place.rank_map.agents[self.index].cells_per_lane
        return tuple(lane_prompts[self.place.coordinate.cell_in_lane :: cells_per_lane])

    def roll_out(self, prompts: Sequence[Prompt], step: int) -> list[Rollout]:
        """G sampled answers to each of this cell's prompts, by prompt, then by rollout.

        Afterwards the engine sleeps until `publish_weights`: its memory is the actor's to learn with.
        """
        places = [(prompt, g) for prompt in prompts for g in range(self._rollout.rollouts_per_prompt)]
        seeds = [answer_seed(self._seed, step, prompt.index, g, self.index) for prompt, g in places]
        rollouts = self._answer(places, seeds, self._rollout.max_answer_tokens, self._rollout.temperature)
        self.engine.sleep()
        self._engine_sleeps = True
        return rollouts

    def answer_greedily(self, prompts: Sequence[Prompt], max_tokens: int) -> list[Rollout]:
        """One most likely answer per prompt: the agent as it would be deployed."""
        return self._answer([(prompt, 0) for prompt in prompts], [0] * len(prompts), max_tokens, temperature=0.0)

    def _answer(
        self, places: list[tuple[Prompt, int]], seeds: list[int], max_tokens: int, temperature: float
    ) -> list[Rollout]:
        mine = slice(self.place.coordinate.engine, None, self._engines_per_cell)
        completions = self.engine.generate(
            [self.codec.encode_prompt(prompt.text) for prompt, _ in places[mine]],
            seeds[mine],
            max_tokens=max_tokens,
            temperature=temperature,
        )
        shared = self._share_in_cell(completions, len(places))
        return [self._rollout_of(prompt, g, completion) for (prompt, g), completion in zip(places, shared)]

    def _rollout_of(self, prompt: Prompt, rollout_index: int, completion: Completion) -> Rollout:
        ended = completion.stop is Stop.EOS
        text = self.codec.decode_answer(completion.token_ids[:-1] if ended else completion.token_ids)
        return Rollout(prompt.index, rollout_index, completion.token_ids, text, completion.stop)

    def _share_in_cell(self, mine: list[Completion], total: int) -> list[Completion]:
        """The answers of all engines of this cell, in the order of the requests: Megatron trains on all of them."""
        if self._engines_per_cell == 1:
            return mine
        speaks = self.place.coordinate.engine_rank == 0
        payloads = gather_bytes(self.place.cell_group, pack_completions(mine) if speaks else b"")
        shared: list[Completion | None] = [None] * total
        for engine, payload in enumerate(payload for payload in payloads if payload):
            shared[engine :: self._engines_per_cell] = unpack_completions(payload)
        return shared

    def score(self, prompts: Sequence[Prompt], rollouts: Sequence[Rollout]) -> list[tuple[float, int]]:
        """(mean log-prob, tokens it is over) of own rollouts under the actor as it is before any update of this step.

        It packs what `learn` will pack, update by update, so that the first update repeats these forwards bit by bit.
        """
        texts = {prompt.index: prompt.text for prompt in prompts}
        samples = [self._own_sample(texts[rollout.prompt_index], rollout) for rollout in rollouts]
        scores: dict[tuple[int, int], tuple[float, int]] = {}
        for update in self.plan(prompts, samples):
            for sample, logprob in zip(update, self.actor.score(update)):
                scores[sample.prompt_index, sample.rollout_index] = (float(logprob), sample.num_trained)
        return [scores[rollout.prompt_index, rollout.rollout_index] for rollout in rollouts]

    def _own_sample(self, prompt_text: str, rollout: Rollout) -> Sample:
        num_trained = trained_tokens(len(rollout.token_ids), rollout.stop is Stop.EOS, self._algorithm.eos_in_loss)
        return Sample(
            source=self.index,
            is_self=True,
            prompt_index=rollout.prompt_index,
            rollout_index=rollout.rollout_index,
            prompt_ids=np.array(self.codec.encode_prompt(prompt_text), dtype=np.int32),
            answer_ids=rollout.token_ids,
            num_trained=num_trained,
            advantage=0.0,
            source_logprob=0.0,
            length=float(max(1, num_trained)),
        )

    def plan(self, prompts: Sequence[Prompt], samples: Sequence[Sample]) -> list[tuple[Sample, ...]]:
        """This cell's samples, split into the updates of the step."""
        return plan_updates(samples, [prompt.index for prompt in prompts], self._prompts_per_update // self._cells)

    def learn(self, update: Sequence[Sample], update_index: int) -> UpdateStats:
        """One optimizer step on this cell's samples of the update. Collective over the agent's ranks."""
        loss = PolicyLoss(update_index, self._weight, self._algorithm, self._reference_logprobs(update))
        return self.actor.learn(update, loss)

    def _reference_logprobs(self, update: Sequence[Sample]) -> dict[SampleKey, np.ndarray]:
        """Token log-probs under the initial policy, of the samples whose KL counts; empty without a KL."""
        if self._algorithm.kl_coef == 0.0:
            return {}
        counted = [sample for sample in update if sample.is_self or self._algorithm.kl_on == "all"]
        keys = [(sample.prompt_index, sample.source, sample.rollout_index) for sample in counted]
        return dict(zip(keys, self.actor.reference_token_logprobs(counted)))

    def publish_weights(self) -> None:
        """Megatron shards into the live vLLM engine, whose cached prefixes are forgotten; it is awake afterwards."""
        if self._engine_sleeps:
            self.engine.wake(cache=False)  # weights first: the cache comes back when nothing is in flight any more
        self.engine.load(self.actor.weights())
        if self._engine_sleeps:
            self.engine.wake()
        self._engine_sleeps = False

    def export(self, folder: Path) -> None:
        """Writes the agent as a Hugging Face folder that runs by itself."""
        self.actor.save_hf(folder)

    def close(self) -> None:
        """Shuts the engine down, while the process groups it uses still exist."""
        self.engine.close()


def pack_completions(completions: Sequence[Completion]) -> bytes:
    """Little-endian: int32 count, int32 lengths, uint8 stops, int32 tokens of all answers end to end."""
    lengths = np.array([len(completion.token_ids) for completion in completions], dtype="<i4")
    stops = np.array([completion.stop for completion in completions], dtype=np.uint8)
    tokens = b"".join(completion.token_ids.astype("<i4").tobytes() for completion in completions)
    return struct.pack("<i", len(completions)) + lengths.tobytes() + stops.tobytes() + tokens


def unpack_completions(payload: bytes) -> list[Completion]:
    """What `pack_completions` wrote."""
    (count,) = struct.unpack_from("<i", payload)
    lengths = np.frombuffer(payload, dtype="<i4", count=count, offset=4)
    stops = np.frombuffer(payload, dtype=np.uint8, count=count, offset=4 + 4 * count)
    tokens = np.frombuffer(payload, dtype="<i4", offset=4 + 5 * count).astype(np.int32)
    answers = np.split(tokens, np.cumsum(lengths)[:-1])
    return [Completion(answer, Stop(stop)) for answer, stop in zip(answers, stops)]
