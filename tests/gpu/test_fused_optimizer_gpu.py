"""On CUDA the optimizer of every library that is installed trains as torch's does (docs/guide/gpus.md)."""

import pytest
import torch
from actor_cases import full_weights, make_actor, one_rank
from bf16_cases import make_folder
from fused_job import UPDATES, update

from hacpo_mega.config import OptimizerConfig
from hacpo_mega.megatron.train.fused_optimizer import THERE

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.fixture(scope="module", autouse=True)
def alone():
    with one_rank("nccl"):
        yield


@pytest.mark.skipif(len(THERE) == 1, reason="needs TransformerEngine or apex (launch/image/Dockerfile)")
def test_each_trains_as_torch_does(tmp_path):
    """Clipped, with weight decay, in float32: to a hundredth of an update's size."""
    folder, trained = make_folder(tmp_path / "model", "qwen3"), {}
    for kernels in THERE:
        config = OptimizerConfig(lr=1e-3, weight_decay=0.1, clip_grad=1e-3, kernels=kernels)
        actor = make_actor(folder, optimizer=config, dtype=torch.float32)
        for number in range(UPDATES):
            update(actor, number)
        trained[kernels] = full_weights(actor)
    for weights in trained.values():
        for name, weight in trained["torch"].items():
            torch.testing.assert_close(weights[name], weight, rtol=0, atol=1e-5)
