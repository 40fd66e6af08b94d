"""The actor's requests to a device stay within written bounds; its kernels over lists are Megatron's, bit for bit."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from actor_cases import one_rank, random_samples
from host_work import HostWork, record_actor
from megatron.core.utils import local_multi_tensor_l2_norm, local_multi_tensor_scale
from tiny_models import make_model

from hacpo_mega.agent.policy_loss import PolicyLoss
from hacpo_mega.config import AlgorithmConfig
from hacpo_mega.megatron.model import delta_net
from hacpo_mega.megatron.model.platform import megatron_platform
from hacpo_mega.megatron.model.shared_prompts import packed_segments
from hacpo_mega.megatron.train.fused_optimizer import INSTALLED
from hacpo_mega.samples.packing import microbatch

# Launches of a layer's forward beside norms, attention, rotations and the gated activation: four products, two sums
# with the residual, and Megatron's copy of the queries out of the fused projection.
LAUNCHES_OF_A_LAYER = 7


@pytest.fixture(scope="module")
def asked(tmp_path_factory):
    """By the number of layers."""
    root, found = tmp_path_factory.mktemp("models"), {}
    with one_rank():
        for num_layers in (1, 3):
            folder = make_model(root / str(num_layers), "qwen3", num_layers=num_layers, dtype=torch.bfloat16)
            found[num_layers] = record_actor(folder)
    return found


def test_the_host_waits_as_often_whatever_the_depth(asked):
    """A micro-batch waits once inside its backward; the other waits come when all of the work has been asked for."""
    parts = {"score: the rest": 2, "score: layers": 0, "learn: layers": 0, "learn: reduction": 0}
    for found in asked.values():
        assert {part: found[part].num_waits for part in parts} == parts
        assert found["learn: optimizer"].num_waits == 1  # for the norm of all gradients
        waits = {where.split(": ")[1]: times for where, times in found["learn: loss and backward"].waits.items()}
        # The head's backward; whether the loss is finite; a micro-batch's report. The last two are the CPU's checks.
        assert waits == {"backward": 1, "sum_over_cells": 1, "<lambda>": 5, "check_segments": 1, "check_objective": 1}


def test_a_layer_asks_for_no_more_than_it_needs(asked):
    for part in ("score: layers", "learn: layers"):
        few, many = (asked[depth][part] for depth in (1, 3))
        assert many.launches - few.launches == 2 * LAUNCHES_OF_A_LAYER, many.names
        assert (few.names["cos"], many.names["cos"]) == (1, 1)
        assert few.uploads == many.uploads == 1


@pytest.mark.parametrize("method", ["hacpo", "grpo"])
def test_a_loss_sends_what_it_needs_without_a_wait(method):
    """Token log-probs lie on the device; samples, old log-probs and the reference on the host."""
    config = AlgorithmConfig(method=method, kl_coef=0.1)
    samples = [replace(sample, source_logprob=-5.0) for sample in random_samples(2, seed=3) if sample.is_self]
    samples = [replace(s, old_logprobs=np.zeros(s.num_trained, np.float32)) for s in samples]
    batch = microbatch([[sample] for sample in samples])
    keys = [(sample.prompt_index, sample.source, sample.rollout_index) for sample in samples]
    reference = {key: np.zeros(s.num_trained, np.float32) for key, s in zip(keys, samples)}
    logprob_R = torch.full((len(batch.rows_R),), -2.0)
    work = HostWork(logprob_R, batch.row_cu_seqlens_B)
    with work.recording(), work.part("loss"):
        PolicyLoss(1, 1.0, config, reference)(logprob_R.requires_grad_(), batch)
    waits = {where: times for where, times in work.asked["loss"].waits.items() if "check_" not in where}
    assert waits == {} and work.asked["loss"].uploads


def test_a_delta_net_does_not_wait(monkeypatch):
    """flash-linear-attention waits for each other tensor of starts: it gets the same one in all layers and passes."""
    met = []
    packed = packed_segments(torch.tensor([0, 130, 150], dtype=torch.int32), None)
    given = [torch.rand(150, 2, 8) for _ in range(3)] + [-torch.rand(150, 2), torch.rand(150, 2)]
    monkeypatch.setattr(delta_net, "DELTA_RULE", lambda *tensors, **how: met.append(how["cu_seqlens"]) or (given, None))
    work = HostWork(packed.cu_seqlens_q, *given)
    with work.recording(), work.part("layers"):
        delta_net.delta_rule(delta_net.DeltaInputs(*given), packed)
        delta_net.causal_convolution(given[0].flatten(1), torch.rand(16, 1, 4), packed)
        for _ in range(2):
            delta_net.fused_rule(delta_net.DeltaInputs(*given), packed)
    assert not work.asked["layers"].waits and work.asked["layers"].uploads == 1
    assert met[0] is met[1] and met[0].dtype is torch.int64


def test_the_optimizer_asks_once_for_all_parameters(asked):
    """But for what Megatron copies one by one: a gradient, and a parameter."""
    more = asked[3]["learn: optimizer"].names - asked[1]["learn: optimizer"].names
    assert set(more) == {"copy_"}


def test_what_is_counted_is_what_a_device_would_be_asked():
    there, here = torch.ones(4), torch.ones(4)
    work = HostWork(there)
    with work.recording(), work.part("by hand"):
        product = (there * 2)[1:]  # a launch and a view
        here + here  # the host's own
        sent = here.to(torch.device("cpu"), non_blocking=True)  # sent
        here.to(torch.device("cpu"))  # sent, and a wait
        product += sent[1:]  # a launch, nothing new
        numbers = [*product.tolist(), product.sum().item()]  # a launch, two waits
        product.cpu() + here[1:]  # a wait; then it is the host's
        empty = torch.empty(3, device=torch.device("cpu"))
        product[product > 2]  # a launch, a wait
        torch.tensor([1.0], device=torch.device("cpu"))  # sent, and a wait
    asked = work.asked["by hand"]
    assert numbers == [3.0, 3.0, 3.0, 9.0]
    assert (asked.launches, asked.uploads, asked.num_waits) == (4, 3, 6)
    assert work.has(sent) and work.has(empty) and not work.has(here)
    assert (asked.names["mul"], asked.names["add_"], asked.names["sum"], asked.names["gt"]) == (1, 1, 1, 1)


@pytest.mark.parametrize("same", [True, False], ids=["in place", "elsewhere"])
def test_norm_and_scale_of_lists_are_megatrons(same):
    generator = torch.Generator().manual_seed(5)
    tensors = [torch.randn(size, generator=generator) * 10.0**power for power, size in enumerate((1, 7, 4097, 33))]
    kernels = INSTALLED["torch"]
    with megatron_platform():
        expected, _ = local_multi_tensor_l2_norm(0, None, [tensors], False)
        found, _ = kernels.apply(kernels.l2norm, None, [tensors], False)
    assert torch.equal(found, expected) and found.shape == (1,)
    into, theirs = ([tensor.clone() for tensor in tensors] for _ in range(2))
    local_multi_tensor_scale(0, None, [theirs, theirs], 0.3)
    read = into if same else tensors
    kernels.apply(kernels.scale, None, [read, into], 0.3)
    assert all(map(torch.equal, into, theirs))
    kernels.apply(kernels.scale, None, [[], []], 0.3)
