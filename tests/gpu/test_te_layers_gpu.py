"""On CUDA TransformerEngine's layers give Hugging Face's logits and gradients in bf16 and repeat bit for bit."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from actor_cases import make_actor
from bf16_cases import check_gradient, check_own_ratios, gradient, make_folder, own_ratios
from megatron.core import parallel_state
from tiny_models import LLAMA3_ROPE, make_model
from transformers import AutoModelForCausalLM

from hacpo_mega.megatron.actor import initialize_parallel
from hacpo_mega.megatron.model.installed import TE_VERSION
from hacpo_mega.megatron.model.model import build_model, forward_packed, lm_head_weight
from hacpo_mega.megatron.weights.names import load_hf_weights
from hacpo_mega.megatron.weights.reshard import full_tensors
from hacpo_mega.models.families.architecture import Architecture

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.skipif(TE_VERSION is None, reason="needs TransformerEngine (docs/guide/gpus.md)"),
]

LENGTHS = (17, 64, 3, 130)
CASES = [("qwen2", {}), ("qwen3", {}), ("llama", {"rope_scaling": LLAMA3_ROPE, "attention_bias": True})]


@pytest.fixture(scope="module", autouse=True)
def world(tmp_path_factory):
    store = dist.FileStore(str(tmp_path_factory.mktemp("store") / "store"), 1)
    dist.init_process_group("cpu:gloo,cuda:nccl", store=store, rank=0, world_size=1)
    initialize_parallel(1, 1, seed=1)
    yield
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


def make(folder: Path, family: str, sizes: dict) -> Path:
    return make_model(folder, family, hidden_size=256, num_heads=4, head_dim=64, dtype=torch.bfloat16, **sizes)


@pytest.mark.parametrize("family, sizes", CASES)
def test_logits_repeatability_and_publishing(tmp_path, family, sizes):
    folder = make(tmp_path, family, sizes)
    options = {"tp": 1, "pp": 1, "dtype": torch.bfloat16, "max_positions": 256}
    model = build_model(Architecture.from_folder(folder), transformer="te", **options)
    load_hf_weights(model, folder)
    tokens_T = torch.arange(sum(LENGTHS)) * 7 % 131
    positions_T = torch.cat([torch.arange(length) for length in LENGTHS])
    pack = tokens_T, positions_T, torch.tensor([0, *LENGTHS]).cumsum(0).int()
    hidden_TH = forward_packed(model, *pack)
    with torch.no_grad():
        assert torch.equal(forward_packed(model, *pack), hidden_TH)
    exact = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).cuda()
    expected_TV = torch.cat([exact(sequence[None]).logits[0] for sequence in tokens_T.cuda().split(LENGTHS)])
    logits_TV = (hidden_TH @ lm_head_weight(model).T)[:, :131].float()
    torch.testing.assert_close(logits_TV, expected_TV, atol=0.06, rtol=0.03)
    published = dict(full_tensors(model))
    for name, parameter in exact.named_parameters():
        assert torch.equal(published[name].float(), parameter), name


def test_an_actor_takes_them_by_itself(tmp_path):
    """And what bf16_cases.py asks of any actor in bf16 holds: own ratios of exactly 1, Hugging Face's gradient."""
    folder = make_folder(tmp_path / "model", "qwen3")
    assert make_actor(folder, dtype=torch.bfloat16).transformer == "te"
    check_own_ratios(own_ratios(folder, 60))
    check_gradient(gradient(folder, 60), folder)
