"""Models of a size that a test traces, and the budget and the trace of a plan: bytes of one phase on either side.

The head is the CPU's on both sides, since a Triton kernel cannot be traced; attention and norms are CUDA's.
"""

from dataclasses import replace

from memory_trace import TracedMemory, trace_actor
from repository import ROOT

from hacpo_mega.config import load_config
from hacpo_mega.config.checks.checks import architecture_of
from hacpo_mega.config.checks.device_memory import agent_budget
from hacpo_mega.memory.actor_bytes import CPU, CUDA, ActorMemory, ActorPlan
from hacpo_mega.models.families.architecture import Architecture
from hacpo_mega.models.families.delta_net import DeltaNet
from hacpo_mega.models.families.heads import Heads
from hacpo_mega.models.families.latent import Latent
from hacpo_mega.models.families.rope import ProportionalRope
from hacpo_mega.models.sharding.layout import Layout

TRACEABLE = replace(CUDA, triton_head=False)
WHOLE_HEADS = replace(CPU, whole_heads=True)  # as in float32 on CUDA
# Models of a size that a test traces in a second.
SMALL = Architecture(
    family="qwen3", num_layers=4, hidden_size=512, num_heads=8, num_kv_heads=2, head_dim=64, ffn_size=1536,
    vocab_size=4000, max_positions=4096, norm_eps=1e-6, rope_theta=1e4, rope=None, tied=False, qkv_bias=False,
    output_bias=False, qk_norm=True,
)  # fmt: skip
LLAMA = replace(SMALL, family="llama", qk_norm=False, tied=True, ffn_size=2048)
QWEN2 = replace(SMALL, family="qwen2", qk_norm=False, qkv_bias=True)
OLMO2 = replace(SMALL, family="olmo2")
GLM4 = replace(QWEN2, family="glm4", rotary_share=0.5)
GEMMA3 = replace(LLAMA, family="gemma3_text", qk_norm=True, windows=(512, None) * 2, window_theta=1e4, query_scalar=64)
# Layers with a window have 8 query heads over 2 of size 64, others over one of size 128 that is key and value.
GEMMA4 = replace(GEMMA3, family="gemma4_text", query_scalar=1, rope=ProportionalRope(0.25),
                 full_heads=Heads(1, 128, has_values=False), softcap=30.0)  # fmt: skip
GEMMA4_MOE = replace(GEMMA4, ffn_size=0, num_experts=16, experts_per_token=4, expert_ffn=192, normalises_experts=True,
                     shared_ffn=1024)  # fmt: skip
DELTA = replace(
    LLAMA, family="qwen3_5_text", qk_norm=True, rotary_share=0.25, delta_net=DeltaNet(4, 8, 64, 64, 4),
    delta_layers=(True, False) * 2,
)  # fmt: skip
EXPERTS = replace(SMALL, family="qwen3_moe", ffn_size=0, num_experts=16, experts_per_token=4, expert_ffn=192,
                  normalises_experts=True)  # fmt: skip
SHARED = replace(EXPERTS, family="glm4_moe", ffn_size=1536, shared_ffn=384, dense_layers=1, num_groups=4,
                 groups_per_token=2, routed_scale=2.5, rotary_share=0.5)  # fmt: skip
# The gated shared expert beside experts, and delta nets.
DELTA_EXPERTS = replace(DELTA, family="qwen3_5_moe_text", ffn_size=0, num_experts=16, experts_per_token=4,
                        expert_ffn=192, normalises_experts=True, shared_ffn=256)  # fmt: skip
# A norm over all heads beside experts.
MINIMAX = replace(EXPERTS, family="minimax_m2", rotary_share=0.5)
# Latents, of queries, too; values shorter than keys.
LATENTS = replace(SHARED, family="deepseek_v3", num_kv_heads=8, head_dim=96, qk_norm=False, rotary_share=1.0,
                  latent=Latent(query_rank=192, rank=256, nope_dim=64, rope_dim=32, value_dim=64))  # fmt: skip
GPT_OSS = replace(EXPERTS, family="gpt_oss", qk_norm=False, qkv_bias=True, output_bias=True, windows=(128, None) * 2)


def plan_of(architecture=SMALL, tp=1, pp=1, recompute="none", device=TRACEABLE, cp=1, ep=1) -> ActorPlan:
    layout = Layout(tp, pp, cp=cp, ep=ep)
    return ActorPlan(architecture, layout, dp=2, num_tokens=2048, recompute=recompute, device=device)


def traced(plan: ActorPlan, stage: int = 0, transformer: str = "local") -> TracedMemory:
    """Memory of the plan's model, on CUDA's kernels or on the CPU's as the plan's device says."""
    return trace_actor(
        plan.architecture,
        plan.layout,
        dp=plan.dp,
        num_tokens=plan.num_tokens,
        pp_rank=stage,
        in_flight=plan.layout.pp - stage,
        recompute=plan.recompute,
        transformer=transformer,
        on_cuda=plan.device.mixed,
        whole_heads=plan.device.whole_heads,
        lora=plan.lora,
    )


def learn_of_trace(memory: TracedMemory) -> int:
    """Bytes of the phase learn that tensors show."""
    states = memory.weights + memory.gradients + memory.main_weights + memory.moments
    return states + memory.gather_buffer + memory.learn


def learn_of_budget(memory: ActorMemory) -> int:
    """The same by formula."""
    states = memory.weights + memory.gradients + memory.main_weights + memory.moments
    return states + memory.gather_buffer + memory.kept + memory.working


def paper_plans(pair: str) -> dict[str, ActorPlan]:
    """The actors of a configuration of configs/paper by their agents' names; the current folder has its models."""
    config = load_config(ROOT / "configs" / "paper" / f"{pair}.toml")
    budgets = {agent.name: agent_budget(config, agent, architecture_of(agent)) for agent in config.agents}
    return {name: replace(budget.actor, device=TRACEABLE) for name, budget in budgets.items()}
