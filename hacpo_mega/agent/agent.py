"""One agent on this rank: tokenizer, Megatron actor, live vLLM engine.

It learns; how it answers and publishes its weights is in answering.py.

Every rank of a cell calls every method with equal arguments; what a method returns is equal on all of them.
Not here: other agents (trainer.py exchanges with them), what engines are asked (sampler.py), scores (scoring.py) and
what an advantage is (algorithm/).
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from hacpo_mega.agent.answering import Answering, load_engine
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
from hacpo_mega.agent.publication import Publication
from hacpo_mega.agent.sampler import Sampler
from hacpo_mega.algorithm import GradientProducts, sample_weight
from hacpo_mega.checkpoint.files import Checkpoint
from hacpo_mega.cluster.host_memory import require_host_memory
from hacpo_mega.cluster.place import Place
from hacpo_mega.cluster.turns import agents_per_device, in_turn
from hacpo_mega.config import AgentConfig, Config
from hacpo_mega.config.checks.checks import architecture_of
from hacpo_mega.config.checks.device_memory import agent_budget
from hacpo_mega.logbook.files.rollout_log import AnswerNotes, AnswerTokens
from hacpo_mega.megatron.actor import Actor
from hacpo_mega.megatron.train.actor_offload import ActorOffload
from hacpo_mega.megatron.train.fused_optimizer import SAID
from hacpo_mega.megatron.train.optimizer import Leaves
from hacpo_mega.memory.actor_bytes import Recompute
from hacpo_mega.records import (
    Prompt,
    Rollout,
    Sample,
    Score,
    UpdateStats,
    ViewCounts,
)
from hacpo_mega.samples.packing import plan_updates


class Agent(Answering):
    """The agent whose ranks that train include this one."""

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
        """Loads the model twice: into Megatron, and from Megatron into vLLM, here or on ranks of the cell that only
        answer (engine_rank.py). Collective over the agent's ranks.

        `start` is the step to go on from; the reference policy of a KL is that of the model folder all the same.
        `split_devices` are its devices where no other agent takes turns on them, `sampler` says what engines are asked.
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
                away = ActorOffload(self.actor.model, self.actor.optimizer)
                away.leave()
                self.engine = load_engine(spec, place, config, self.dtype, self.codec.ends)
                with place.spans.span("weights"):
                    self.publication = Publication(place, self.actor, self.engine)
                self.devices = SharedDevices(place, self.actor, away, self.engine, self.publication)
                self.publish_weights(step)
        if not shares:
            with in_turn(place, agents_on_device > 1):
                answers = place.coordinate.answers
                ends = self.codec.ends
                self.engine = load_engine(spec, place, config, self.dtype, ends, agents_on_device) if answers else None
                with place.spans.span("weights"):
                    self.publication = Publication(place, self.actor, self.engine)
                    self.devices = (split_devices if answers else ApartDevices)(
                        place, self.actor, self.engine, self.publication
                    )
                    self.publish_weights(step)
        self._weight = sample_weight(
            self._prompts_per_update, self._answers_per_prompt, len(config.agents), config.algorithm
        )

    @property
    def layers_said(self) -> str:
        """Whose layers and Adam the actor has, by name and version, for people."""
        layers = SAID["te"] if self.actor.transformer == "te" else "local"
        return f"{self.name} {layers}, {self.actor.optimizer.said}"

    def plan(self, prompts: Sequence[Prompt], samples: Sequence[Sample]) -> list[tuple[Sample, ...]]:
        """This cell's samples, split into the updates of the step."""
        return plan_updates(samples, [prompt.index for prompt in prompts], self._prompts_per_update // self.num_cells)

    def learn(self, update: Sequence[Sample], update_index: int) -> UpdateStats:
        """One optimizer step on this cell's samples of the update. Collective over the agent's ranks."""
        # A replayed routing is of own answers alone: others must not share their prompts.
        packing = None if update_index == 0 or self._replays else self.actor.pack
        return self.actor.learn(update, self._policy_loss(update, update_index), packing)

    def diagnose(self, update: Sequence[Sample], update_index: int) -> GradientProducts:
        """What own answers pull at, and beside it every source's, by the loss that `learn` would have now.

        Group 0 is the own answers', then the other agents' by their index. The agent is the same afterwards, to the
        last bit. Collective over the agent's ranks.
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
        views: Sequence[ViewCounts],
    ) -> AnswerNotes:
        """What this cell knows of the answers to the lane's `prompts`, for the log; rollouts and scores are its own."""
        ratios = {key: ratio for update in updates for key, ratio in ratios_by_key(update).items()}
        reasons = {(a.prompt_index, j, a.rollout_index): a.reason for j, view in enumerate(views) for a in view.dropped}
        reasons |= {key: "outside_band" for update in updates for key in outside_band(update)}
        seen = tuple(self.codec.shown_prompt(prompt.text) for prompt in prompts)
        tokens = self._describe_tokens(rollouts, scores, updates) if self._logs_tokens else []
        scored = tuple((*key, score.mean_logprob) for key, score in scores_of_update(updates[0]).items())
        ids = tuple(self.codec.encode_prompt(prompt.text) for prompt in prompts) if self._logs_tokens else ()
        return AnswerNotes(ratios, seen, ids, tuple(tokens), scored, reasons)

    def _describe_tokens(
        self, rollouts: Sequence[Rollout], scores: Sequence[Score | None], updates: Sequence[UpdateStats]
    ) -> Iterator[AnswerTokens]:
        """The tokens of this cell's answers with what the actor said of them."""
        learnt = own_token_logprobs(updates, self.index)
        for rollout, score in zip(rollouts, scores, strict=True):
            old = None if score is None else score.token_logprobs
            new = learnt.get((rollout.prompt_index, rollout.rollout_index))
            ratios = None if old is None or new is None else np.exp(new - old)
            ids = tuple(rollout.token_ids.tolist())
            pieces = self.codec.pieces(ids)
            yield AnswerTokens(rollout.prompt_index, rollout.rollout_index, ids, pieces, old, ratios)

    def _reference_logprobs(self, update: Sequence[Sample]) -> dict[SampleKey, np.ndarray]:
        """Token log-probs under the initial policy, of the samples whose KL counts; empty without a KL."""
        if self._algorithm.kl_coef == 0.0:
            return {}
        counted = [sample for sample in update if sample.is_self or self._algorithm.kl_on == "all"]
        keys = [(sample.prompt_index, sample.source, sample.rollout_index) for sample in counted]
        # Of another policy than the engine's: its own routers send its tokens.
        unrouted = [replace(sample, routing=None) for sample in counted]
        return dict(zip(keys, self.actor.reference_token_logprobs(unrouted)))

    def save(self, folder: Path, *, copies: bool) -> tuple[dict[str, int | str], Callable[[], None]]:
        """What AgentState says of weights and optimizer, and what writes these into an empty folder; as Actor.save.

        Collective as `learn`.
        """
        counts, write = self.actor.save(folder, copies=copies)
        return {**counts, "dtype": str(self.dtype).removeprefix("torch.")}, write

    def not_finite(self) -> str | None:
        """What of this rank's share of the agent's weights and optimizer holds NaN or infinity; None where nothing."""
        found = self.actor.not_finite()
        return None if found is None else f"{found} of {self.name} is not finite"

    def export(self, folder: Path) -> None:
        """Writes the agent as a Hugging Face folder that runs by itself."""
        with self.devices.scoring():
            self.actor.save_hf(folder, added_end=self.codec.ends.added)


def _actor(spec: AgentConfig, place: Place, config: Config, start: Checkpoint | None, recompute: Recompute) -> Actor:
    """The agent's actor as `start` left it, the state of its optimizer away: vLLM wants its memory when it starts."""
    actor = Actor(
        spec.model,
        layout=spec.layout(config.lanes),
        optimizer=spec.optimizer,
        total_updates=config.updates_per_step * config.num_steps,
        max_positions=config.rollout.max_prompt_tokens + config.longest_answer,
        max_tokens_per_microbatch=config.training.max_tokens_per_microbatch,
        share_prompts=config.training.share_prompts,
        temperature=config.rollout.temperature,
        seed=config.seed,
        recompute=recompute,
        leaves=_what_leaves(spec, config),
        lora=spec.adapters(architecture_of(spec)),
        transformer=spec.transformer,
        communication=spec.data_parallel,
        overrides=spec.megatron,
        spans=place.spans,
        timeout_s=config.wait_s,
        on_progress=place.progress,
        reports=REPORTS,
    )
    if config.algorithm.kl_coef > 0.0:
        actor.keep_reference()
    if start is not None:
        state = start.agents[spec.name]
        actor.load(start.folder / spec.name, num_updates=state.num_updates, num_applied=state.num_applied)
    actor.optimizer.offload.start_leaving()
    actor.optimizer.offload.finish_leaving()
    return actor


def _what_leaves(spec: AgentConfig, config: Config) -> Leaves:
    if config.placement == "shared":
        return "everything"
    return "state" if spec.offload == "optimizer" else "nothing"
