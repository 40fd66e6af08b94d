"""The optimizer's state through pinned memory on a stream of its own: its bytes are the device's, its numbers stay."""

import pytest
import torch
from actor_cases import make_actor, objective, one_rank, random_samples
from bf16_cases import make_folder
from offload_cases import ADAM, kept, num_bytes

from hacpo_mega.logbook.steps.step_metrics import held_bytes
from hacpo_mega.megatron.train.offload import Offload

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.fixture(scope="module", autouse=True)
def alone():
    with one_rank("nccl"):
        yield


@pytest.fixture
def actor(tmp_path):
    actor = make_actor(make_folder(tmp_path / "model", "qwen3"), optimizer=ADAM, offload_mode="state")
    actor.learn(random_samples(4, seed=1), objective)
    return actor


def test_an_actors_state_leaves_the_device_and_comes_back(actor):
    offload, state = actor.optimizer.offload, kept(actor)
    expected, held = [tensor.cpu() for tensor in state], torch.cuda.memory_allocated()
    size = num_bytes(state)
    offload.begin_offload()
    offload.finish_offload()
    assert held - torch.cuda.memory_allocated() >= size + 4 * sum(buffer.numel for buffer in actor.model.buffers)
    on_host = kept(actor)
    assert all(tensor.is_pinned() and tensor.device.type == "cpu" for tensor in on_host)
    assert all(torch.equal(tensor, then) for tensor, then in zip(on_host, expected, strict=True))
    with pytest.raises(RuntimeError, match="gradient buffers have left"):
        actor.learn(random_samples(4, seed=2), objective)
    offload.begin_onload()
    actor.learn(random_samples(4, seed=3), objective)  # waits for them
    assert torch.cuda.memory_allocated() >= held
    assert [torch.equal(tensor.cpu(), then) for tensor, then in zip(state, expected, strict=True)].count(True) < len(
        state
    )


def test_copies_wait_for_the_work_before_them_and_are_waited_for():
    """A long product is under way as the numbers leave, and another in the memory that they come back to."""
    matrix = torch.randn(4096, 4096, device="cuda")
    state = torch.zeros(64 << 20, device="cuda")
    offload = Offload([state])
    for trip in range(1, 4):
        for _ in range(20):
            matrix = matrix @ matrix / 64
        state.add_(1.0)
        offload.begin_offload()
        offload.finish_offload()
        assert float(offload.readable(state).min()) == float(offload.readable(state).max()) == trip
        taken = torch.full((64 << 20,), 7.0, device="cuda")
        for _ in range(20):
            taken.mul_(1.5).div_(1.5)
        del taken
        offload.begin_onload()
        offload.ensure_on_device()
        assert float(state.min()) == float(state.max()) == trip


def test_what_the_device_holds_falls_by_what_has_left():
    state = torch.zeros(256 << 20, device="cuda")
    offload, before = Offload([state]), held_bytes()
    offload.begin_offload()
    offload.finish_offload()
    assert before - held_bytes() >= state.element_size() * (256 << 20)


def test_gradients_are_off_the_device_while_the_engine_would_generate(tmp_path):
    """By the budget: weights, main weights and moments stay, 2 + 4 + 8 bytes a number, and gradients are 4 more."""
    before = held_bytes()
    actor = make_actor(make_folder(tmp_path / "model", "qwen3"), optimizer=ADAM, offload_mode="gradients")
    actor.learn(random_samples(4, seed=1), objective)
    numbers, allocated = sum(buffer.numel for buffer in actor.model.buffers), torch.cuda.memory_allocated()
    actor.optimizer.offload.begin_offload()
    actor.optimizer.offload.finish_offload()
    assert allocated - torch.cuda.memory_allocated() >= 4 * numbers
    assert held_bytes() - before <= 14 * numbers + (512 << 20), "what a process keeps of libraries, and its pools"
    actor.optimizer.offload.begin_onload()
    actor.learn(random_samples(4, seed=2), objective)
    assert torch.cuda.memory_allocated() >= allocated
