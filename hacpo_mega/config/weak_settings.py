"""Settings under which a run learns less than it could: lines for people. Imports no torch.

Not here: settings with which nothing can be learnt at all, which are refused (checks.py).
"""

from collections.abc import Iterator

from hacpo_mega.config.tables.schema import Config

# Below it a model that has been trained gives nearly one answer to a prompt.
COLD = 0.2


def weak_settings(config: Config) -> Iterator[str]:
    """A line for each such setting."""
    algorithm, answers = config.algorithm, config.rollout.rollouts_per_prompt
    if config.answers_compared == 1 and algorithm.advantages is None:
        yield (
            f"rollout.rollouts_per_prompt = {answers}: {algorithm.method!r} has no second answer to measure one of its "
            "own against, so an agent learns from the others' alone"
        )
    if (temperature := config.rollout.temperature) < COLD:
        yield (
            f"rollout.temperature = {temperature:g}: answers to a prompt will hardly differ, and equal rewards teach "
            "nothing"
        )
    if algorithm.cross_objective == "band" and len(config.agents) > 1 and algorithm.delta == 0.0:
        yield "algorithm.delta = 0: others' answers train only where their ratio is exactly 1, which is hardly ever"
    updates = config.num_steps * config.updates_per_step
    for agent in config.agents:
        if (warmup := agent.optimizer.warmup_updates) > updates:
            yield (
                f"agents.{agent.name}.optimizer.warmup_updates = {warmup}: the run has {updates} updates, so its "
                f"learning rate ends at {agent.optimizer.lr * updates / warmup:.3g} instead of {agent.optimizer.lr:g}"
            )
