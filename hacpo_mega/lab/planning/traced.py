"""The plan's memory against the real Megatron model on tensors without numbers (lab/memory_trace.py).

The head's chunk of logits is the CPU's on both sides, since a Triton kernel has no fake. Loads torch and Megatron.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from hacpo_mega.lab.memory_trace import trace_actor
from hacpo_mega.lab.planning.plan import AgentPlan, Plan
from hacpo_mega.lab.planning.table import aligned
from hacpo_mega.memory.actor_bytes import actor_memory
from hacpo_mega.memory.budget import GIB


@dataclass(frozen=True)
class Traced:
    """Bytes of states, activations and backward of an agent's fullest stage, by formula and as counted."""

    agent: str
    formula: int
    counted: int

    @property
    def error(self) -> float:
        """Of the formula, as a share of what was counted."""
        return self.formula / self.counted - 1.0


def trace(agent: AgentPlan) -> Traced:
    """Runs forward, backward and step of the agent's model. Needs a process without process groups."""
    actor, stage = agent.budget.actor, agent.budget.stage
    positions = max(actor.architecture.max_positions, actor.num_tokens)  # a micro-batch is traced as one sequence
    found = trace_actor(
        replace(actor.architecture, max_positions=positions),
        replace(actor.layout, engine_tp=None),
        dp=actor.dp,
        num_tokens=actor.num_tokens,
        pp_rank=stage,
        in_flight=actor.layout.pp - stage,
        recompute=actor.recompute,
        overrides={"bias_activation_fusion": True} if actor.fused_swiglu else {},
        on_cuda=actor.device.mixed,
    )
    formula = actor_memory(replace(actor, device=replace(actor.device, triton_head=False)), stage)
    states = ("weights", "gradients", "main_weights", "moments", "gather_buffer")
    return Traced(
        agent.name,
        sum(getattr(formula, state) for state in states) + formula.kept + formula.working,
        sum(getattr(found, state) for state in states) + found.learn,
    )


def trace_table(plan: Plan) -> str:
    """All agents, one after the other."""
    return aligned(list(_rows([trace(agent) for agent in plan.agents])))


def _rows(traced: list[Traced]) -> Iterator[list[str]]:
    yield ["phase learn as tensors show it", "formula GiB", "traced GiB", "error"]
    for one in traced:
        yield [one.agent, f"{one.formula / GIB:.3f}", f"{one.counted / GIB:.3f}", f"{one.error:+.2%}"]
