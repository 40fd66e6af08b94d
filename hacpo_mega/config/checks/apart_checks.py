"""Checks of placement = "apart", where engines have devices of their own.

Not here: whether engine_tp divides them (models/sharding/layout.py), and how many processes that makes
(cluster/rank_map.py).
"""

from collections.abc import Iterator

from hacpo_mega.config.tables.schema import Config


def apart_problems(config: Config) -> Iterator[str]:
    """A line for every key that does not fit the placement, with the nearest value that does."""
    if config.placement != "apart":
        for agent in config.agents:
            if agent.rollout_gpus:
                yield (
                    f"agents.{agent.name}.rollout_gpus ({agent.rollout_gpus}): with placement = {config.placement!r} "
                    "engines are on the devices that train. Nearest: placement = 'apart', or no rollout_gpus"
                )
        return
    if config.reward.while_sampling:
        yield (
            "reward.while_sampling: with placement = 'apart' the process that judges has no engine whose answers it "
            "sees end. Nearest: false"
        )
    for agent in config.agents:
        if agent.rollout_gpus is None:
            yield (
                f"agents.{agent.name}.rollout_gpus: with placement = 'apart' its engines have devices of their own, "
                f"and their number is not given. Nearest: {agent.engine_tp or 1}"
            )
        if agent.offload == "optimizer":
            yield (
                f"agents.{agent.name}.offload: with placement = 'apart' the actor shares its device with no engine, so "
                "nothing is ever offloaded. Nearest: 'none'"
            )
