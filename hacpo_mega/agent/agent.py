"""One agent on this rank: tokenizer, Megatron actor, live vLLM engine.

The agent learns here; its rollout side is in rollout_client.py. All ranks of a cell call every method with equal
arguments and get equal results.

Not here: other agents (trainer.py exchanges with them), generation requests (sampler.py), scores (scoring.py),
advantages (algorithm/).
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from hacpo_mega.agent.devices import ApartDevices, OwnDevices, SharedDevices
from hacpo_mega.agent.policy_loss import (
    REPORTS,
    PolicyLoss,
    SampleKey,
    outside_band,
    own_token_logprobs,
    ratios_by_key,
    scores_of_update,
)
from hacpo_mega.agent.rollout_client import RolloutClient, load_engine
from hacpo_mega.agent.sampler import Sampler
from hacpo_mega.agent.weight_sync import WeightSync
from hacpo_mega.algorithm import GradientProducts, sample_weight
from hacpo_mega.checkpoint.files import Checkpoint
from hacpo_mega.cluster.host_memory import require_host_memory
from hacpo_mega.cluster.place import Place
from hacpo_mega.cluster.turns import agents_per_device, in_turn
from hacpo_mega.config import AgentConfig, Config
from hacpo_mega.config.checks.checks import architecture_of
from hacpo_mega.config.checks.device_memory import agent_budget
from hacpo_mega.logbook.files.rollout_log import AnswerNotes, AnswerTokens
from hacpo_mega.megatron.actor import Actor, ActorHooks, ActorSpec
from hacpo_mega.megatron.train.fused_optimizer import VERSIONS
from hacpo_mega.megatron.train.optimizer import ActorOffload, OffloadMode
from hacpo_mega.memory.actor_bytes import Recompute
from hacpo_mega.records import (
    Prompt,
    ReencodingCounts,
    Rollout,
    Sample,
    Score,
    UpdateStats,
)
from hacpo_mega.samples.packing import plan_updates


class Agent(RolloutClient):
    """The agent that this training rank belongs to."""

    def __init__(
        self,
        spec: AgentConfig,
        place: Place,
        config: Config,
        start: Checkpoint | None = None,
        *,
        split_devices: type[OwnDevices] = OwnDevices,
        sampler: Callable[..., Sampler] = Sampler,
    ) -> None:
        """Loads the model into Megatron, and from Megatron into vLLM. Collective over the agent's ranks.

        The engine is on this rank, or on ranks of the cell that only generate (rollout_worker.py).
        `start` is the checkpoint to resume from; the reference policy of a KL is always the model folder.
        `split_devices` is the device policy where no other agent shares the devices. `sampler` makes the generation
        requests.
        """
        super().__init__(spec, place, config, sampler)
        self._algorithm = config.algorithm
        self._logs_tokens = config.logging.rollout_tokens
        self._num_agents, self._replays = len(config.agents), spec.router_replay
        self._prompts_per_update = config.prompts_per_update
        budget = agent_budget(config, spec, architecture_of(spec))
        require_host_memory(place, budget.parts["on the host"])
        step = 0 if start is None else start.step
        agents_on_device, shares = agents_per_device(place), config.placement == "shared"
        with in_turn(place, shares):
            with place.spans.span("actor"):
                self.actor = _actor(spec, place, config, start, budget.actor.recompute)
            self.dtype = self.actor.model.config.params_dtype
            self.offload = self.actor.optimizer.offload
            if shares:
                actor_offload = ActorOffload(self.actor.model, self.actor.optimizer)
                actor_offload.offload()
                self.engine = load_engine(spec, place, config, self.dtype, self.codec.ends)
                with place.spans.span("weights"):
                    self.weight_sync = WeightSync(place, self.actor, self.engine)
                self.devices = SharedDevices(place, self.actor, actor_offload, self.engine, self.weight_sync)
                self.publish_weights(step)
        if not shares:
            with in_turn(place, agents_on_device > 1):
                answers = place.coordinate.answers
                ends = self.codec.ends
                self.engine = load_engine(spec, place, config, self.dtype, ends, agents_on_device) if answers else None
                with place.spans.span("weights"):
                    self.weight_sync = WeightSync(place, self.actor, self.engine)
                    self.devices = (split_devices if answers else ApartDevices)(
                        place, self.actor, self.engine, self.weight_sync
                    )
                    self.publish_weights(step)
        self._weight = sample_weight(
            self._prompts_per_update, self._answers_per_prompt, len(config.agents), config.algorithm
        )

    @property
    def backend_summary(self) -> str:
        """Transformer and optimizer backend with versions, for the startup log."""
        layers = VERSIONS["te"] if self.actor.transformer == "te" else "local"
        return f"{self.name} {layers}, {self.actor.optimizer.summary}"

    def plan(self, prompts: Sequence[Prompt], samples: Sequence[Sample]) -> list[tuple[Sample, ...]]:
        """Splits this cell's samples into the step's optimizer updates."""
        return plan_updates(samples, [prompt.index for prompt in prompts], self._prompts_per_update // self.num_cells)

    def learn(self, update: Sequence[Sample], update_index: int) -> UpdateStats:
        """One optimizer step on this cell's samples of the update. Collective over the agent's ranks."""
        # Only own answers have a replayed routing, so others' answers must not share their prompts.
        packing = None if update_index == 0 or self._replays else self.actor.pack
        return self.actor.learn(update, self._policy_loss(update, update_index), packing)

    def diagnose(self, update: Sequence[Sample], update_index: int) -> GradientProducts:
        """Gradient norms and inner products of own answers and of every other source, under the loss of `learn`.

        Group 0 holds own answers, the others follow by agent index. The agent is bit-identical afterwards. Collective
        over the agent's ranks.
        """
        sources = (self.index, *(j for j in range(self._num_agents) if j != self.index))
        groups = [[sample for sample in update if sample.source == source] for source in sources]
        return self.actor.gradient_products(groups, self._policy_loss(update, update_index))

    def _policy_loss(self, update: Sequence[Sample], update_index: int) -> PolicyLoss:
        reference = self._reference_logprobs(update)
        return PolicyLoss(update_index, self._weight, self._algorithm, reference, self._logs_tokens)

    def describe(
        self,
        prompts: Sequence[Prompt],
        rollouts: Sequence[Rollout],
        scores: Sequence[Score | None],
        updates: Sequence[UpdateStats],
        reencodings: Sequence[ReencodingCounts],
    ) -> AnswerNotes:
        """Log notes on the answers to the lane's `prompts`, as far as this cell knows them.

        `rollouts` and `scores` are this cell's.
        """
        ratios = {key: ratio for update in updates for key, ratio in ratios_by_key(update).items()}
        reasons = {(a.prompt_index, j, a.rollout_index): a.reason for j, r in enumerate(reencodings) for a in r.dropped}
        reasons |= {key: "outside_band" for update in updates for key in outside_band(update)}
        seen = tuple(self.codec.shown_prompt(prompt.text) for prompt in prompts)
        tokens = self._describe_tokens(rollouts, scores, updates) if self._logs_tokens else []
        scored = tuple((*key, score.mean_logprob) for key, score in scores_of_update(updates[0]).items())
        ids = tuple(self.codec.encode_prompt(prompt.text) for prompt in prompts) if self._logs_tokens else ()
        return AnswerNotes(ratios, seen, ids, tuple(tokens), scored, reasons)

    def _describe_tokens(
        self, rollouts: Sequence[Rollout], scores: Sequence[Score | None], updates: Sequence[UpdateStats]
    ) -> Iterator[AnswerTokens]:
        """Tokens of this cell's answers with old log-probs and ratios."""
        learnt = own_token_logprobs(updates, self.index)
        for rollout, score in zip(rollouts, scores, strict=True):
            old = None if score is None else score.token_logprobs
            new = learnt.get((rollout.prompt_index, rollout.rollout_index))
            ratios = None if old is None or new is None else np.exp(new - old)
            ids = tuple(rollout.token_ids.tolist())
            pieces = self.codec.pieces(ids)
            yield AnswerTokens(rollout.prompt_index, rollout.rollout_index, ids, pieces, old, ratios)

    def _reference_logprobs(self, update: Sequence[Sample]) -> dict[SampleKey, np.ndarray]:
        """Token log-probs under the initial policy, for the samples whose KL counts; empty without a KL."""
        if self._algorithm.kl_coef == 0.0:
            return {}
        counted = [sample for sample in update if sample.is_self or self._algorithm.kl_on == "all"]
        keys = [(sample.prompt_index, sample.source, sample.rollout_index) for sample in counted]
        # The reference is another policy than the engine's: its own routers choose the experts.
        unrouted = [replace(sample, routing=None) for sample in counted]
        return dict(zip(keys, self.actor.reference_token_logprobs(unrouted)))

    def save(self, folder: Path, *, copies: bool) -> tuple[dict[str, int | str], Callable[[], None]]:
        """Starts a checkpoint: the counts of AgentState, and a function that writes weights and optimizer to a folder.

        See Actor.save. Collective as `learn`.
        """
        counts, write = self.actor.save(folder, copies=copies)
        return {**counts, "dtype": str(self.dtype).removeprefix("torch.")}, write

    def not_finite(self) -> str | None:
        """Name of this rank's first weight or optimizer tensor that holds NaN or infinity; None if all are finite."""
        found = self.actor.not_finite()
        return None if found is None else f"{found} of {self.name} is not finite"

    def export(self, folder: Path) -> None:
        """Writes the agent as a stand-alone Hugging Face folder."""
        with self.devices.scoring():
            self.actor.save_hf(folder, added_end=self.codec.ends.added)


def _actor(spec: AgentConfig, place: Place, config: Config, start: Checkpoint | None, recompute: Recompute) -> Actor:
    """Builds the agent's actor from `start`, with its optimizer state offloaded: vLLM needs that memory to start."""
    plan = ActorSpec(
        layout=spec.layout(config.lanes),
        optimizer=spec.optimizer,
        total_updates=config.updates_per_step * config.num_steps,
        max_positions=config.rollout.max_prompt_tokens + config.longest_answer,
        max_tokens_per_microbatch=config.training.max_tokens_per_microbatch,
        share_prompts=config.training.share_prompts,
        temperature=config.rollout.temperature,
        seed=config.seed,
        recompute=recompute,
        offload_mode=_offload_mode(spec, config),
        lora=spec.adapters(architecture_of(spec)),
        transformer=spec.transformer,
        communication=spec.data_parallel,
        overrides=spec.megatron,
        timeout_s=config.wait_s,
    )
    actor = Actor(spec.model, plan, ActorHooks(place.spans, place.progress, REPORTS))
    if config.algorithm.kl_coef > 0.0:
        actor.keep_reference()
    if start is not None:
        state = start.agents[spec.name]
        actor.load(start.folder / spec.name, num_updates=state.num_updates, num_applied=state.num_applied)
    actor.optimizer.offload.begin_offload()
    actor.optimizer.offload.finish_offload()
    return actor


def _offload_mode(spec: AgentConfig, config: Config) -> OffloadMode:
    if config.placement == "shared":
        return "everything"
    return "state" if spec.offload == "optimizer" else "nothing"
