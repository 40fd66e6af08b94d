"""Whether an agent can replay the routing of its engine (agents.router_replay): its model, vLLM, its arguments."""

from collections.abc import Iterator

from hacpo_mega.config.checks.pass_through import RETURNS_ROUTING, engine_fields
from hacpo_mega.config.tables.agents import AgentConfig
from hacpo_mega.models.families.architecture import Architecture

WITHOUT = "Nearest: router_replay = false"


def routing_problems(agent: AgentConfig, architecture: Architecture, *, on_cpu: bool) -> Iterator[str]:
    """A line for what cannot be, with the nearest thing that works."""
    if not agent.router_replay:
        return
    if not architecture.has_experts:
        yield f"router_replay: a {architecture.family} model has no experts whose choice could be replayed. {WITHOUT}"
        return
    if architecture.shared_ffn:
        yield f"router_replay: not for models with shared experts, as {architecture.family}. {WITHOUT}"
        return
    if on_cpu:  # there it is written down beside vLLM (rollout/vllm/routing.py)
        return
    fields = engine_fields()
    if fields is not None and RETURNS_ROUTING not in fields:
        yield f"router_replay: the vLLM that is installed has no {RETURNS_ROUTING}: it returns no routing. {WITHOUT}"
    if agent.vllm.get("enable_prefix_caching") is False:
        yield (
            "vllm.enable_prefix_caching = false: with router_replay vLLM keeps the routing of a prefix beside its "
            "cache. Nearest: without it"
        )
