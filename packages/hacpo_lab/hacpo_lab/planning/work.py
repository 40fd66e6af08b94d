"""The work that a step asks of an agent: answers, tokens, updates. Not here: who does it (cluster/rank_map.py)."""

from dataclasses import dataclass

from hacpo_mega.config import Config


@dataclass(frozen=True)
class Work:
    """One agent's step, all its cells together.

    answers         it samples                          pool      answers of all agents to the same prompts
    scored          of them before its first update     trained   answers it learns from
    updates         optimizer updates                   scored_updates   those whose answers are scored before
    sources         agents it learns from, itself among them
    prompt_tokens, answer_tokens   of a prompt and an answer, on average
    longest         tokens of the longest answer, which the slowest engine waits for
    """

    prompts: int
    answers: float
    pool: float
    trained: float
    updates: int
    sources: int
    scored_updates: int
    prompt_tokens: float
    answer_tokens: float
    longest: float

    @property
    def scored(self) -> float:
        """Answers whose score does not come from the update that trains them (training.score_in_first_update)."""
        return self.answers * self.scored_updates / self.updates

    @property
    def length(self) -> float:
        """Tokens that are read of a prompt and its answer: of the last one nothing is predicted."""
        return self.prompt_tokens + self.answer_tokens - 1


@dataclass(frozen=True)
class Lengths:
    """Tokens of a prompt and an answer, on average; None: half of the longest that the configuration allows."""

    prompt_tokens: int | None = None
    answer_tokens: int | None = None


def work_of(config: Config, lengths: Lengths) -> Work:
    """The work that a step asks of each agent. ValueError for lengths that the configuration does not allow."""
    rollout, num_agents = config.rollout, len(config.agents)
    limits = (("prompt", lengths.prompt_tokens, rollout.max_prompt_tokens),
              ("answer", lengths.answer_tokens, rollout.max_answer_tokens))  # fmt: skip
    for what, tokens, most in limits:
        if tokens is not None and not 1 <= tokens <= most:
            raise ValueError(
                f"--{what}-tokens ({tokens}) must be 1 to rollout.max_{what}_tokens ({most}). "
                f"Nearest: {min(max(tokens, 1), most)}"
            )
    prompts = config.training.prompts_per_step
    answers = prompts * config.answers_per_prompt
    sources = num_agents if config.algorithm.shares_answers else 1
    return Work(
        prompts=prompts,
        answers=answers,
        pool=answers * num_agents,
        trained=answers * sources,
        updates=config.updates_per_step,
        sources=sources,
        scored_updates=config.updates_per_step - config.scores_in_first_update,
        prompt_tokens=lengths.prompt_tokens or -(-rollout.max_prompt_tokens // 2),
        answer_tokens=lengths.answer_tokens or -(-rollout.max_answer_tokens // 2),
        longest=rollout.max_answer_tokens,
    )
