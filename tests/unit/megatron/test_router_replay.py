"""Router replay by hand: what is packed, what travels, what a router does with it, what it takes, what is refused."""

import dataclasses
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from actor_cases import one_rank
from run_cases import CHARACTERS, agent_table, write_config
from tiny_models import make_model

from hacpo_mega.config import load_config
from hacpo_mega.config.checks.device_memory import agent_budget
from hacpo_mega.megatron.actor import initialize_parallel
from hacpo_mega.megatron.model.layers import RMSNorm
from hacpo_mega.megatron.model.model import transformer_config
from hacpo_mega.megatron.model.platform import megatron_platform
from hacpo_mega.megatron.model.router import Router
from hacpo_mega.megatron.train.schedule import expert_load
from hacpo_mega.models.families.architecture import Architecture
from hacpo_mega.models.sharding.layout import Layout
from hacpo_mega.records import Completion, Stop, TokenSequence
from hacpo_mega.rollout import wire
from hacpo_mega.rollout.engine import RunningAnswers
from hacpo_mega.rollout.exchange import COMPLETION_ROW
from hacpo_mega.rollout.vllm.routing import ReturnedRouting
from hacpo_mega.samples.packing import microbatch

NOBODY = 255


def routing(*experts: int) -> np.ndarray:
    """One layer, one expert of each token."""
    return np.array(experts, np.uint8)[:, None, None]


def sequence(prompt: list[int], answer: list[int], *experts: int, num_trained: int | None = None) -> TokenSequence:
    told = routing(*experts) if experts else None
    return TokenSequence(np.int32(prompt), np.int32(answer), len(answer) if num_trained is None else num_trained,
                         routing=told)  # fmt: skip


def test_tokens_of_a_pack_go_where_those_of_their_sequences_went():
    """A prompt that two share, an answer alone of which the last token is not trained, one of which nobody says."""
    shared = [sequence([1, 2], [3, 4], 10, 11, 12), sequence([1, 2], [5, 6, 7], 20, 21, 22, NOBODY)]
    alone = sequence([8], [9, 9, 9], 30, 31, 32, num_trained=2)
    batch = microbatch([shared, [alone], [sequence([4, 4], [5])]], multiple=8)
    # Prompt 1 2; alone 8 9; 4 4; the longer answer 5 6, the other 3; and what fills up to 16.
    assert batch.tokens_T.tolist() == [1, 2, 8, 9, 4, 4, 5, 6, 3, *[0] * 7]
    assert batch.routing_TLK[:, 0, 0].tolist() == [10, 11, 30, 31, -1, -1, 22, -1, 12, *[-1] * 7]
    assert batch.routing_TLK.dtype is torch.int16
    assert microbatch([[sequence([4, 4], [5])]]).routing_TLK is None


def test_more_than_255_experts_take_two_bytes():
    told = np.array([[[300, 7]], [[65535, 65535]]], np.uint16)
    (batch,) = [microbatch([[TokenSequence(np.int32([1]), np.int32([2, 3]), 2, routing=told)]])]
    assert batch.routing_TLK.tolist() == [[[300, 7]], [[-1, -1]]]


@pytest.mark.parametrize("kind", [np.uint8, np.uint16])
def test_a_routing_travels_with_every_bit(kind):
    rng = np.random.default_rng(4)
    told = [rng.integers(250, size=(size, 3, 2)).astype(kind) for size in (5, 0, 9)]
    tokens = [np.arange(size, dtype=np.int32) for size in (2, 0, 4)]
    rows = np.array([(0,), (1,), (2,)], COMPLETION_ROW)
    message = wire.encode(wire.Table(rows, tokens, ["", "a", ""], None, told))
    table = wire.decode(message, COMPLETION_ROW, "me")
    assert [found.dtype for found in table.routing] == [kind] * 3
    assert all(map(np.array_equal, table.routing, told)) and all(map(np.array_equal, table.tokens, tokens))
    for damaged in (message[:-3], message + b"a"):
        with pytest.raises(ValueError, match="message of me: "):
            wire.decode(damaged, COMPLETION_ROW, "me")


@pytest.fixture(scope="module")
def router(tmp_path_factory) -> Router:
    folder = make_model(tmp_path_factory.mktemp("model"), "qwen3_moe", num_experts=6, experts_per_token=2)
    architecture = dataclasses.replace(Architecture.from_folder(folder), normalises_experts=True)
    with one_rank():
        initialize_parallel(1, 1, seed=1, ep=1)
        with megatron_platform():
            config = transformer_config(architecture, Layout(), dtype=torch.float32, overrides={})
            made = Router(architecture, config, RMSNorm)
        torch.nn.init.normal_(made.weight, generator=torch.Generator().manual_seed(3))
        yield made


def test_a_router_shares_out_by_its_own_numbers_what_it_is_told(router):
    hidden = torch.randn(3, 64, generator=torch.Generator().manual_seed(7)) / 8
    with torch.no_grad():
        own_shares, own = router(hidden)
        probs = (hidden @ router.weight.T).softmax(dim=-1)
    other = next(expert for expert in range(6) if expert not in own[1].tolist())
    told = torch.tensor([own[0].flip(0).tolist(), [other, int(own[1, 0])], [-1, -1]], dtype=torch.int16)
    router.load_E.zero_()
    shares, experts = router(hidden, told)
    assert experts.tolist() == [own[0].flip(0).tolist(), [other, int(own[1, 0])], own[2].tolist()]
    torch.testing.assert_close(shares[0], own_shares[0].flip(0), rtol=1e-6, atol=0)
    expected = probs[1, experts[1]] / probs[1, experts[1]].sum()
    torch.testing.assert_close(shares[1].detach(), expected, rtol=1e-6, atol=0)
    assert torch.equal(shares[2].detach(), own_shares[2]), "of a token that nobody speaks of, every bit"
    shares[1, 0].backward()
    grad = router.weight.grad
    assert grad[other].abs().max() > 0 and grad[own[1, 1]].abs().max() < 1e-9, "the expert left out has no share"
    assert router.load_E.tolist() == torch.bincount(experts.flatten(), minlength=6).tolist()
    assert router.replayed_2.tolist() == [1, 4]
    assert expert_load(router.load_E[None], router.replayed_2[None]).changed == 0.25
    assert expert_load(router.load_E[None], torch.zeros(1, 2)).changed is None


def test_what_vllm_returns_is_as_long_as_what_was_read(tmp_path):
    """On CUDA; of what was cut before it had run nothing is returned."""
    architecture = Architecture.from_folder(make_model(tmp_path, "mixtral", num_experts=6))
    llm = SimpleNamespace(request_counter=SimpleNamespace(counter=0))
    running = RunningAnswers(llm, 2, None, None, routing=ReturnedRouting(architecture))
    rows = np.arange(12, dtype=np.uint8).reshape(3, 2, 2)
    asked = [(rows, [5, 6]), (None, [])]
    outputs = [
        SimpleNamespace(
            request_id=str(n), prompt_token_ids=[1, 2],
            outputs=[SimpleNamespace(routed_experts=told, token_ids=answer, logprobs=None, finish_reason="stop")],
        )
        for n, (told, answer) in enumerate(asked)
    ]  # fmt: skip
    running.after_step(outputs)
    first, second = map(running.completion, outputs)
    assert isinstance(first, Completion) and first.stop is Stop.EOS
    assert first.routing.tolist() == rows.tolist()
    assert second.routing.tolist() == [[[NOBODY] * 2] * 2]


def problems(folder: Path, *overrides: str) -> list[str]:
    if not (folder / "run.toml").exists():
        agents = [
            agent_table(folder, "sparse", "qwen3_moe", CHARACTERS),
            agent_table(folder, "dense", "llama", CHARACTERS),
            agent_table(folder, "shared", "glm4_moe", CHARACTERS),
        ]
        write_config(folder, agents)
    try:
        load_config(folder / "run.toml", list(overrides))
    except ValueError as found:
        return [line.partition("run.toml: ")[2] for line in str(found).splitlines()]
    return []


def test_what_cannot_replay_is_refused(tmp_path):
    assert problems(tmp_path, "agents.sparse.router_replay=true") == []
    (line,) = problems(tmp_path, "agents.dense.router_replay=true")
    assert line == (
        "agents.dense: router_replay: a llama model has no experts whose choice could be replayed. "
        "Nearest: router_replay = false"
    )
    (line,) = problems(tmp_path, "agents.shared.router_replay=true")
    assert line == (
        "agents.shared: router_replay: not for models with shared experts, as glm4_moe. Nearest: router_replay = false"
    )
    (line,) = problems(tmp_path, "agents.sparse.vllm.enable_return_routed_experts=true")
    assert "vllm.enable_return_routed_experts is decided by this project" in line
    on_cuda = (
        "agents.sparse.router_replay=true",
        "device_memory_gib=79",
        "agents.sparse.vllm.gpu_memory_utilization=0.3",
    )
    assert problems(tmp_path, *on_cuda) == []
    (line,) = problems(tmp_path, *on_cuda, "agents.sparse.vllm.enable_prefix_caching=false")
    assert line.endswith("keeps the routing of a prefix beside its cache. Nearest: without it")


def test_its_bytes_are_counted(tmp_path):
    problems(tmp_path)
    budgets = {}
    for asked in ("true", "false"):
        config = load_config(tmp_path / "run.toml", [f"agents.sparse.router_replay={asked}"])
        budgets[asked] = agent_budget(config, config.agents[0], Architecture.from_folder(tmp_path / "sparse")).parts
    # 8 prompts x 4 answers of 12 tokens and prompts of 8, 2 layers, 2 experts; 256 tokens of a micro-batch, int16.
    assert budgets["true"]["answers' routing"] == 8 * 4 * 20 * 2 * 2
    assert budgets["true"]["activations"] - budgets["false"]["activations"] == 256 * 2 * 2 * 2
    assert budgets["false"]["answers' routing"] == 0
