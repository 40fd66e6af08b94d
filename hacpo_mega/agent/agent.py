"""One agent on this rank: tokenizer, Megatron actor, live vLLM engine.

The agent scores its answers and learns here; its rollout side is in rollout_client.py. All ranks of a cell call every
method with equal arguments and get equal results.

Scores are the actor's log-probs of the agent's own answers before it learns (log-prob recompute). All are computed
before the step's first update. The answers of that update are packed as it will pack them, and the rest together. In
bf16 those of each later update are packed as it will pack them, too: other micro-batches would round differently, by
about the width of the own clip.
With `training.score_in_first_update` the first update's answers are not scored: the update computes the same log-probs,
from the same weights in the same micro-batches, and its report has them bit for bit. This requires that nothing needs
the scores before: another agent needs them to learn, and engine_correction to scale an advantage.
With the engine's log-probs as scores (Config.engine_scores) the actor computes none.

Elsewhere: other agents (trainer.py exchanges with them), generation requests (sampler.py), advantages (algorithm/), the
ratios that use the scores (policy_loss.py).
"""

import socket
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from hacpo_mega.agent.devices import device_policy
from hacpo_mega.agent.policy_loss import (
    REPORTS,
    PolicyLoss,
    SampleKey,
    outside_band,
    own_token_logprobs,
    ratios_by_key,
    scores_of_update,
)
from hacpo_mega.agent.rollout_client import RolloutClient, require_fit
from hacpo_mega.agent.sampler import Sampler
from hacpo_mega.algorithm import GradientProducts, engine_weights, sample_weight
from hacpo_mega.checkpoint.files import Checkpoint
from hacpo_mega.cluster.machine.device import actor_dtype
from hacpo_mega.cluster.place import Place
from hacpo_mega.cluster.turns import in_turn
from hacpo_mega.config import AgentConfig, Config
from hacpo_mega.config.checks.checks import architecture_of
from hacpo_mega.config.checks.device_memory import agent_budget
from hacpo_mega.logbook.files.rollout_log import AnswerNotes, AnswerTokens
from hacpo_mega.logbook.step_report import StepResult
from hacpo_mega.megatron.actor import Actor, ActorHooks, ActorSpec
from hacpo_mega.megatron.model.attention import has_flash3
from hacpo_mega.megatron.train.fused_optimizer import VERSIONS
from hacpo_mega.megatron.train.optimizer import OffloadMode
from hacpo_mega.memory.budget import Budget
from hacpo_mega.models.flops import pairs_per_token
from hacpo_mega.records import Prompt, Rollout, Sample, Score, TokenSequence, UpdateStats
from hacpo_mega.samples.packing import TokenWork, deal_answers, plan_updates


class Agent:
    """The agent that this training rank belongs to.

    rollout   generates its answers; the engine is on this rank, or on ranks of the cell that only generate
    actor     its model, which learns
    """

    def __init__(
        self,
        spec: AgentConfig,
        place: Place,
        config: Config,
        start: Checkpoint | None = None,
        *,
        sampler: Callable[..., Sampler] = Sampler,
    ) -> None:
        """Loads the model into Megatron, and from Megatron into vLLM. Collective over the job.

        `start` is the checkpoint to resume from; the reference policy of a KL is always the model folder. `sampler`
        makes the generation requests.
        """
        self.name, self.index = spec.name, place.agent
        self._algorithm = config.algorithm
        self._logs_tokens = config.logging.rollout_tokens
        self._num_agents, self._num_steps = len(config.agents), config.num_steps
        self._replays_routing = spec.router_replay
        self._rollout_config, self._takes_engine_scores = config.rollout, config.engine_scores
        self._logs_engine_gap = config.engine_scores and not config.mode.one_step_off
        self._scores_in_first_update = config.scores_in_first_update
        self._prompts_per_update = config.prompts_per_update // config.lanes  # of a lane
        self._cells_per_lane = spec.cells_per_lane
        budget = agent_budget(config, spec, architecture_of(spec))
        keeps, state = config.checkpoint, budget.parts["main weights"] + budget.parts["moments"]
        copied = state if keeps.is_on and keeps.asynchronous else 0
        agents_on_device = require_fit(spec, place, config, budget.parts["on the host"], copied)
        step = 0 if start is None else start.step
        with in_turn(place, device_policy(config.mode).takes_turns):
            with place.spans.span("actor"):
                self.actor = _build_actor(spec, place, config, start, budget)
            self.rollout = RolloutClient(
                spec,
                place,
                config,
                self.actor,
                step=step,
                agents_on_device=agents_on_device,
                budget=budget,
                sampler=sampler,
            )
        self.codec, self._devices = self.rollout.codec, self.rollout.devices
        # Own answers of every update are then scored in its micro-batches. In float32 other micro-batches change a
        # log-prob by 1e-7, far below any clip: those of all later updates are scored together, in fewer micro-batches.
        self._scores_by_update = self.actor.dtype == torch.bfloat16 and not config.engine_scores
        self._weight = sample_weight(
            config.prompts_per_update, config.answers_per_prompt, len(config.agents), config.algorithm
        )

    @property
    def backend_summary(self) -> str:
        """Transformer and optimizer backend with versions, for the startup log."""
        local = "local with flash-attention 3" if has_flash3() else "local"
        layers = VERSIONS["te"] if self.actor.transformer == "te" else local
        return f"{self.name} {layers}, {self.actor.optimizer.summary}"

    def deal(self, prompts: Sequence[Prompt], tokens_PNG: Tensor, trains_PNG: Tensor) -> np.ndarray:
        """Cell in the lane that scores and trains each answer, int64 [P, N, G] (samples/packing.py)."""
        work = TokenWork(pairs_per_token(self.actor.architecture), self.actor.shares_prompts)
        return deal_answers(
            tokens_PNG.numpy(),
            trains_PNG.numpy(),
            np.array([len(self.codec.encode_prompt(prompt.text)) for prompt in prompts]),
            learner=self.index,
            cells=self._cells_per_lane,
            prompts_per_update=self._prompts_per_update,
            work=work,
        )

    def score(
        self, prompts: Sequence[Prompt], rollouts: Sequence[Rollout], own_P: Tensor, wanted_PG: Tensor
    ) -> list[Score | None]:
        """Log-probs of this cell's B answers before any update of this step; None for answers that need none now.

        prompts     the lane's
        rollouts    answers that were dealt to this cell, by prompt, then by rollout
        own_P       bool [P], prompts whose own answers this agent trains on: all of these are scored
        wanted_PG   bool [P, G], answers that others train on

        The answers of the first update, in bf16 of every update, are scored as it will pack them, so that it repeats
        these forwards bit by bit. The rest, and what only others want, follow together.
        """
        place_of = {prompt.index: p for p, prompt in enumerate(prompts)}
        place_B = [place_of[rollout.prompt_index] for rollout in rollouts]
        is_own_B = own_P[place_B].tolist()
        needs_B = [own or bool(wanted_PG[p, r.rollout_index]) for own, p, r in zip(is_own_B, place_B, rollouts)]
        if self._takes_engine_scores:
            return [self._engine_score(r) if needs_score else None for r, needs_score in zip(rollouts, needs_B)]
        scores: list[Score | None] = [None] * len(rollouts)
        # One batch for the own answers of each of these first updates, and one for all other answers.
        num_updates = -(-len(prompts) // self._prompts_per_update) if self._scores_by_update else 1
        batches: list[list[int]] = [[] for _ in range(num_updates + 1)]
        for b, p in enumerate(place_B):
            if needs_B[b]:
                update = p // self._prompts_per_update if is_own_B[b] else num_updates
                batches[min(update, num_updates)].append(b)
        if self._scores_in_first_update:
            for b in batches.pop(0):
                # Without a trained token the update computes nothing either.
                if rollouts[b].num_trained(self._algorithm.eos_in_loss) == 0:
                    scores[b] = Score(0.0, np.zeros(0, dtype=np.float32))
            if len(prompts) == self._prompts_per_update:  # others want none (config/checks/checks.py)
                return scores  # so the device is not needed
        with self._devices.scoring():
            for batch in batches:
                sequences = [self._sequence(prompts[place_B[b]], rollouts[b]) for b in batch]
                for b, score in zip(batch, self.actor.score(sequences), strict=True):
                    scores[b] = self._weighted(score, rollouts[b])
        return scores

    def _engine_score(self, rollout: Rollout) -> Score:
        """Log-probs of the policy that wrote the answer, as its engine returned them, with weight 1."""
        logprobs = rollout.trained_logprobs(self._algorithm.eos_in_loss)
        mean = np.float32(logprobs.mean(dtype=np.float64)) if len(logprobs) else 0.0
        return Score(float(mean), logprobs)

    def _weighted(self, score: Score, rollout: Rollout) -> Score:
        """The score with the weights of rollout.engine_correction."""
        answer_weight, weights_T = engine_weights(
            trainer_T=torch.from_numpy(score.token_logprobs),
            engine_T=torch.from_numpy(rollout.trained_logprobs(self._algorithm.eos_in_loss)),
            correction=self._rollout_config.engine_correction,
            cap=self._rollout_config.engine_correction_cap,
        )
        token_weights = None if weights_T is None else weights_T.numpy()
        return replace(score, engine_weight=answer_weight, token_weights=token_weights)

    def _sequence(self, prompt: Prompt, rollout: Rollout) -> TokenSequence:
        prompt_ids = np.array(self.codec.encode_prompt(*rollout.asked(prompt)), dtype=np.int32)
        eos_in_loss = self._algorithm.eos_in_loss
        return TokenSequence(
            prompt_ids,
            rollout.token_ids,
            rollout.num_trained(eos_in_loss),
            trained_places=rollout.trained_places(eos_in_loss),
            segment_starts=rollout.segment_starts,
            routing=rollout.routing,
        )

    def plan(self, prompts: Sequence[Prompt], samples: Sequence[Sample]) -> list[tuple[Sample, ...]]:
        """Splits this cell's samples of the lane's `prompts` into the step's optimizer updates."""
        return plan_updates(samples, [prompt.index for prompt in prompts], self._prompts_per_update)

    def learn(self, update: Sequence[Sample], update_index: int, step: int) -> UpdateStats:
        """One optimizer step on this cell's samples of the update. Collective over the agent's ranks.

        `step` counts from 1, `update_index` from 0 within the step.
        """
        # By default the actor packs own answers apart from others', as they were scored. A replayed routing needs that,
        # too: only own answers have one, and answers that share a prompt share its routing.
        packs_apart = update_index == 0 or self._replays_routing or self._scores_by_update
        packing = None if packs_apart else self.actor.pack
        return self.actor.learn(update, self._policy_loss(update, update_index, step), packing)

    def diagnose(self, update: Sequence[Sample], update_index: int, step: int) -> GradientProducts:
        """Gradient norms and inner products of own answers and of every other source, under the loss of `learn`.

        Group 0 holds own answers, the others follow by agent index. The agent is bit-identical afterwards. Collective
        over the agent's ranks.
        """
        sources = (self.index, *(j for j in range(self._num_agents) if j != self.index))
        groups = [[sample for sample in update if sample.source == source] for source in sources]
        return self.actor.gradient_products(groups, self._policy_loss(update, update_index, step))

    def _policy_loss(self, update: Sequence[Sample], update_index: int, step: int) -> PolicyLoss:
        reference = self._reference_logprobs(update)
        keeps_tokens = self._logs_tokens or (self._logs_engine_gap and update_index == 0)
        return PolicyLoss(
            update_index, self._weight, self._algorithm, reference, keeps_tokens, step=step, num_steps=self._num_steps
        )

    def answer_notes(self, result: StepResult) -> AnswerNotes:
        """Notes for the rollout log on the answers to the lane's prompts, as far as this cell knows them."""
        prompts, updates = result.pool.prompts, result.updates
        ratios = {key: ratio for update in updates for key, ratio in ratios_by_key(update).items()}
        reasons = {
            (answer.prompt_index, source, answer.rollout_index): answer.reason
            for source, counts in enumerate(result.reencodings)
            for answer in counts.dropped
        }
        reasons |= {key: "outside_band" for update in updates for key in outside_band(update)}
        shown = tuple(self.codec.shown_prompt(prompt.text) for prompt in prompts)
        tokens = tuple(self._answer_tokens(result)) if self._logs_tokens else ()
        scored = tuple((*key, score.mean_logprob) for key, score in scores_of_update(updates[0]).items())
        ids = tuple(self.codec.encode_prompt(prompt.text) for prompt in prompts) if self._logs_tokens else ()
        return AnswerNotes(ratios, shown, ids, tokens, scored, reasons)

    def _answer_tokens(self, result: StepResult) -> Iterator[AnswerTokens]:
        """Tokens of this cell's answers with old log-probs and ratios."""
        current = own_token_logprobs(result.updates, self.index)
        for rollout, score in zip(result.rollouts, result.scores, strict=True):
            old = None if score is None else score.token_logprobs
            new = current.get((rollout.prompt_index, rollout.rollout_index))
            ratios = None if old is None or new is None else np.exp(new - old)
            ids = tuple(rollout.token_ids.tolist())
            pieces = self.codec.pieces(ids)
            places = rollout.trained_places(self._algorithm.eos_in_loss)
            yield AnswerTokens(rollout.prompt_index, rollout.rollout_index, ids, pieces, old, ratios, places)

    def _reference_logprobs(self, update: Sequence[Sample]) -> dict[SampleKey, np.ndarray]:
        """Token log-probs under the initial policy, for the samples that the KL counts; empty without a KL."""
        if self._algorithm.kl_coef == 0.0:
            return {}
        counted = [sample for sample in update if sample.is_self or self._algorithm.kl_on == "all"]
        keys = [(sample.prompt_index, sample.source, sample.rollout_index) for sample in counted]
        # Replayed routing is the engine's; the reference is another policy, whose own routers choose the experts.
        unrouted = [replace(sample, routing=None) for sample in counted]
        return dict(zip(keys, self.actor.reference_token_logprobs(unrouted)))

    def save(self, folder: Path, *, copies: bool) -> tuple[dict[str, int | str], Callable[[], None]]:
        """Starts a checkpoint: the counts of AgentState, and a function that writes weights and optimizer to a folder.

        See Actor.save. Collective as `learn`.
        """
        counts, write = self.actor.save(folder, copies=copies)
        return {**counts, "dtype": str(self.rollout.dtype).removeprefix("torch.")}, write

    def not_finite(self) -> str | None:
        """Name of this rank's first weight or optimizer tensor that holds NaN or infinity; None if all are finite."""
        tensor = self.actor.not_finite()
        return None if tensor is None else f"{tensor} of {self.name} is not finite"

    def export(self, folder: Path) -> None:
        """Writes the agent as a stand-alone Hugging Face folder, after its last answer."""
        with self._devices.exporting():
            self.actor.save_hf(folder, added_end=self.codec.ends.added)


def _build_actor(spec: AgentConfig, place: Place, config: Config, start: Checkpoint | None, budget: Budget) -> Actor:
    """Builds the agent's actor from `start`, and offloads what can be: vLLM needs that memory to start."""
    actor_spec = ActorSpec(
        layout=spec.layout(config.lanes),
        optimizer=spec.optimizer,
        total_updates=config.updates_per_step * config.num_steps,
        max_positions=config.rollout.max_prompt_tokens + config.longest_answer,
        max_tokens_per_microbatch=config.training.max_tokens_per_microbatch,
        share_prompts=config.training.share_prompts,
        temperature=config.rollout.temperature,
        seed=config.seed,
        recompute=budget.actor.recompute,
        offload_mode=_offload_mode(budget),
        lora=spec.adapters(architecture_of(spec)),
        transformer=spec.transformer,
        communication=spec.data_parallel.by_nodes(place.gather_agent(socket.gethostname().encode())),
        overrides=spec.megatron,
        dtype=actor_dtype(place.device, spec.dtype),
        timeout_s=config.wait_s,
    )
    actor = Actor(spec.model, actor_spec, ActorHooks(place.spans, place.progress, REPORTS))
    if config.algorithm.kl_coef > 0.0:
        actor.keep_reference()
    if start is not None:
        state = start.agents[spec.name]
        actor.load(start.folder / spec.name, num_updates=state.num_updates, num_applied=state.num_applied)
    actor.optimizer.offload.begin_offload()
    actor.optimizer.offload.finish_offload()
    return actor


def _offload_mode(budget: Budget) -> OffloadMode:
    if budget.actor.offloads:
        return "everything" if budget.actor.shares else "state"
    return "gradients" if budget.frees_gradients else "nothing"
