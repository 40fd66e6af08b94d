"""The loop: every agent answers, all share, each learns. This file is the table of contents of a HACPO step.

Every process of the job runs it, in lockstep, each for the agent, lane and cell that its rank belongs to (place.py).
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

import torch

from hacpo_mega.agent import Agent
from hacpo_mega.algorithm import CapabilityTracker, hacpo_advantages
from hacpo_mega.cluster.place import Place
from hacpo_mega.cluster.rank_map import RankMap
from hacpo_mega.config import Config
from hacpo_mega.data.prompt_sets import held_out_prompts, training_sampler
from hacpo_mega.grading.judge import Judge
from hacpo_mega.logbook.metrics import Metrics
from hacpo_mega.logbook.run_folder import RunFolder
from hacpo_mega.logbook.step_metrics import add_accuracy, add_answers, add_capability, add_update, add_view
from hacpo_mega.policy_loss import SampleKey, ratios_by_key
from hacpo_mega.records import Judgement, Pool, Prompt, Rollout, Sample, Trajectory, UpdateStats
from hacpo_mega.rollout.exchange import exchange
from hacpo_mega.samples.learner_view import ViewRules, learner_view, same_tokenizers
from hacpo_mega.samples.tokenizers import agent_codecs, fits_every_agent


class Trainer:
    """All agents of a configuration, trained together. One per process."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.names = tuple(agent.name for agent in config.agents)
        self.steps_done = 0

    def fit(self) -> None:
        """Evaluates, trains `num_steps` steps, evaluates, and exports every agent. Collective over the job."""
        with ExitStack() as stack:
            self._open(stack)
            self._evaluate()
            self.folder.write_step(0, self.metrics.reduce())
            while self.steps_done < self.config.num_steps:
                self.step()
            with self._phase("export"):
                self.agent.export(self.config.run_dir / "agents" / self.agent.name)
            self.agent.close()  # after an error the process ends as it is: closing an engine may wait for dead peers

    def _open(self, stack: ExitStack) -> None:
        config = self.config
        self.place = stack.enter_context(Place.join(RankMap.of(config)))
        self.folder = stack.enter_context(RunFolder(config, self.place))
        self.metrics = Metrics(self.names[self.place.agent], self.place.gather_job, self.folder.show_phase)
        codecs = agent_codecs(config.agents)
        fits = fits_every_agent(codecs, config.rollout.max_prompt_tokens)
        self.sampler, num_dropped = training_sampler(config, fits)
        self.held_out = held_out_prompts(config, fits)
        if num_dropped:
            self.folder.say(f"{num_dropped} prompts dropped: longer than rollout.max_prompt_tokens for some agent")
        reward = config.reward
        self.judge = stack.enter_context(
            Judge(reward.kind, reward.num_workers, reward.timeout_s, reward.require_stop, options=reward.options)
        )
        self.capability = CapabilityTracker(len(config.agents), config.algorithm)
        with self._phase("load"):
            self.agent = Agent(config.agents[self.place.agent], self.place, config)
        self.view_rules = ViewRules(
            same_tokenizer=same_tokenizers(self.agent.codec.fingerprint, [codec.fingerprint for codec in codecs]),
            shares_answers=config.algorithm.shares_answers,
            eos_in_loss=config.algorithm.eos_in_loss,
            ratio_length=config.algorithm.ratio_length,
            max_answer_tokens=config.rollout.max_answer_tokens,
        )

    def step(self) -> None:
        """One HACPO step (ALGORITHM section 2): everyone answers, everyone shares, each learns."""
        prompts = self.sampler.at(self.steps_done, self.place.lane, self.config.lanes)
        mine = self.agent.my_prompts(prompts)
        with self._phase("roll_out"):
            rollouts = self.agent.roll_out(mine, self.steps_done)
        with self._phase("judge"):
            judgements = self._judge(mine, rollouts)
        with self._phase("score"):  # log-probs of the policy that will learn, before it learns
            scores = self.agent.score(mine, rollouts)
        with self._phase("exchange"):
            trajectories = self._trajectories(rollouts, judgements, scores)
            pool = exchange(trajectories, prompts, self.place, self.config.rollout.rollouts_per_prompt)
            advantages_PNG = self._advantages(pool)
            samples = self._view(pool, advantages_PNG)
        with self._phase("learn"):
            ratios = {}
            for update_index, update in enumerate(self.agent.plan(mine, samples)):
                result = self.agent.learn(update, update_index)
                ratios |= self._report_update(result, update_index)
        with self._phase("publish"):  # Megatron shards -> the live vLLM engine
            self.agent.publish_weights()
        self.steps_done += 1
        if self._evaluation_is_due():
            self._evaluate()
        seen = [self.agent.codec.shown_prompt(prompt.text) for prompt in pool.prompts]
        self.folder.write_rollouts(self.steps_done, pool, advantages_PNG, ratios, seen)
        self.folder.write_step(self.steps_done, self.metrics.reduce())

    def _judge(self, prompts: Sequence[Prompt], rollouts: Sequence[Rollout]) -> list[Judgement]:
        """One judgement per rollout, on the cell's leader; nobody else needs them."""
        if not self.place.is_leader:
            return []
        by_index = {prompt.index: prompt for prompt in prompts}
        asked = [by_index[rollout.prompt_index] for rollout in rollouts]
        return self.judge.judge(
            [prompt.text for prompt in asked],
            [prompt.gold for prompt in asked],
            [rollout.text for rollout in rollouts],
            [rollout.stop for rollout in rollouts],
        )

    def _trajectories(
        self, rollouts: Sequence[Rollout], judgements: Sequence[Judgement], scores: Sequence[tuple[float, int]]
    ) -> list[Trajectory]:
        """Judged and scored rollouts of this cell, on its leader; and what they say about this agent."""
        if not self.place.is_leader:
            return []
        trajectories = [
            Trajectory(self.place.agent, rollout, judgement.verdict, judgement.reward, logprob, num_scored)
            for rollout, judgement, (logprob, num_scored) in zip(rollouts, judgements, scores, strict=True)
        ]
        add_answers(self.metrics, self.agent.name, trajectories)
        return trajectories

    def _advantages(self, pool: Pool) -> torch.Tensor:
        """Capability from all lanes, then this agent's advantages on the lane's cube [P, N, G]."""
        reward_N, positive_N, judged_N = self.place.sum_over_lanes(pool.tally()).unbind(dim=1)
        self.capability.update(reward_N / judged_N, positive_N / judged_N)
        capability_N = self.capability.values()
        if self.place.coordinate.global_rank == 0:
            add_capability(self.metrics, self.names, capability_N, self.config.algorithm)
        return hacpo_advantages(pool.rewards_PNG, capability_N, self.place.agent, self.config.algorithm)

    def _view(self, pool: Pool, advantages_PNG: torch.Tensor) -> list[Sample]:
        """What this cell trains on: all agents' answers to its own prompts, in its agent's tokens."""
        cells_per_lane = self.place.rank_map.agents[self.place.agent].cells_per_lane
        mine = slice(self.place.coordinate.cell_in_lane, None, cells_per_lane)
        part = Pool(pool.prompts[mine], pool.trajectories_PNG[mine])
        samples, counts = learner_view(part, advantages_PNG[mine], self.place.agent, self.agent.codec, self.view_rules)
        if self.place.is_leader:
            add_view(self.metrics, self.agent.name, counts)
        return samples

    def _report_update(self, result: UpdateStats, update_index: int) -> dict[SampleKey, float]:
        if self.place.is_leader:
            add_update(self.metrics, result, update_index, self.place.agent, self.names, self.config.algorithm)
        return ratios_by_key(result)

    def _evaluation_is_due(self) -> bool:
        every = self.config.evaluation.every_steps
        return self.steps_done == self.config.num_steps or (every > 0 and self.steps_done % every == 0)

    def _evaluate(self) -> None:
        """Greedy accuracy on the held-out prompts, which the agent's cells share among themselves."""
        my, lanes = self.place.coordinate, self.config.lanes
        mine = self.held_out[my.cell :: lanes * self.place.rank_map.agents[my.agent].cells_per_lane]
        if not self.held_out:
            return
        longest = self.config.evaluation.max_answer_tokens or self.config.rollout.max_answer_tokens
        with self._phase("evaluate"):
            answers = self.agent.answer_greedily(mine, longest)
            judgements = self._judge(mine, answers)
            if self.place.is_leader:
                add_accuracy(self.metrics, self.agent.name, mine, judgements)

    @contextmanager
    def _phase(self, phase: str) -> Iterator[None]:
        """Times a phase, shows it, and names it in case this process dies in it."""
        self.place.enter_phase(phase, self.steps_done + 1)
        with self.metrics.time(phase):
            yield
