"""On CUDA the optimizer of every library that is installed trains as torch's does (docs/guide/gpus.md)."""

import pytest
import torch
from actor_cases import full_weights, make_actor, one_rank
from bf16_cases import make_folder
from fused_job import UPDATES, update

from hacpo_mega.config import OptimizerConfig
from hacpo_mega.megatron.model.platform import megatron_platform
from hacpo_mega.megatron.train.fused_optimizer import INSTALLED
from hacpo_mega.megatron.train.overlap import buffers_of

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.fixture(scope="module", autouse=True)
def alone():
    with one_rank("nccl"):
        yield


@pytest.mark.skipif(len(INSTALLED) == 1, reason="needs TransformerEngine or apex (launch/image/Dockerfile)")
def test_each_trains_as_torch_does(tmp_path):
    """Clipped, with weight decay, in float32: to a hundredth of an update's size."""
    folder, trained = make_folder(tmp_path / "model", "qwen3"), {}
    for kernels in INSTALLED:
        config = OptimizerConfig(lr=1e-3, weight_decay=0.1, clip_grad=1e-3, kernels=kernels)
        actor = make_actor(folder, optimizer=config, dtype=torch.float32)
        for number in range(UPDATES):
            update(actor, number)
        trained[kernels] = full_weights(actor)
    for weights in trained.values():
        for name, weight in trained["torch"].items():
            torch.testing.assert_close(weights[name], weight, rtol=0, atol=1e-5)


def main_weights(actor) -> list[torch.Tensor]:
    groups = [group for part in actor.optimizer.parts for group in part.shard_fp32_from_float16_groups]
    return [weight for group in groups for weight in group]


def test_torchs_adam_in_one_pass_is_its_adam_in_several(tmp_path):
    """On a bf16 actor and the same gradients the float32 main weights differ by float32's roundings alone."""
    folder, trained = make_folder(tmp_path / "model", "qwen3"), []
    config = OptimizerConfig(lr=1e-3, weight_decay=0.1, clip_grad=1e3, kernels="torch")
    for is_fused in (True, False):
        actor = make_actor(folder, optimizer=config, dtype=torch.bfloat16)
        for group in actor.optimizer.megatron.param_groups:
            assert group["fused"], "what an actor on CUDA has"
            group["fused"], group["foreach"] = is_fused, not is_fused
        generator = torch.Generator("cuda").manual_seed(3)
        for _ in range(UPDATES):
            for buffer in buffers_of(actor.model):
                buffer.grad_data.normal_(generator=generator)
            with megatron_platform():
                assert actor.optimizer.step(0.0).applied
        trained.append(main_weights(actor))
        assert {weight.dtype for weight in trained[-1]} == {torch.float32}
        assert {float(state["step"]) for state in actor.optimizer._states()} == {UPDATES}
    for fused, plain in zip(*trained, strict=True):
        torch.testing.assert_close(fused, plain, rtol=2**-21, atol=UPDATES * config.lr * 1e-5)
