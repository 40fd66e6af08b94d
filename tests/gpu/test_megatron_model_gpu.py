"""On CUDA the packed flash attention and bf16 weights give Hugging Face's logits, and scores repeat bit for bit."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from tiny_models import LLAMA3_ROPE, YARN_ROPE, make_model
from transformers import AutoModelForCausalLM

from hacpo_mega.megatron.actor import initialize_parallel
from hacpo_mega.megatron.model.attention import _attend_flash, _attend_in_groups
from hacpo_mega.megatron.model.model import build_model, forward_packed, lm_head_weight
from hacpo_mega.megatron.model.shared_prompts import packed_segments
from hacpo_mega.megatron.weights.names import load_hf_weights
from hacpo_mega.models.families.architecture import Architecture

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

LENGTHS = (17, 64, 3, 130)
APART = {"gradient_accumulation_fusion": False}  # there are no buffers of gradients here


@pytest.fixture(scope="module", autouse=True)
def world(tmp_path_factory):
    store = dist.FileStore(str(tmp_path_factory.mktemp("store") / "store"), 1)
    dist.init_process_group("nccl", store=store, rank=0, world_size=1)
    initialize_parallel(1, 1, seed=1)
    yield
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    "family, sizes",
    [
        ("qwen2", {}),
        ("qwen3", {}),
        ("llama", {"rope_scaling": LLAMA3_ROPE}),
        ("mistral", {"window": 9}),
        ("phi3", {"rope_scaling": {"partial_rotary_factor": 0.5}}),
        ("olmo3", {"window": 9, "rope_scaling": YARN_ROPE}),
        ("glm4", {}),
        ("gemma3_text", {"window": 9}),
    ],
)
def test_logits_and_repeatability(tmp_path: Path, family: str, sizes: dict, dtype: torch.dtype):
    """In half precision an error is judged by the one that Hugging Face's own has, against float32 of equal weights."""
    folder = make_model(tmp_path, family, hidden_size=256, num_heads=4, head_dim=64, dtype=dtype, **sizes)
    model = build_model(Architecture.from_folder(folder), tp=1, pp=1, dtype=dtype, max_positions=256, overrides=APART)
    load_hf_weights(model, folder)
    tokens_T = torch.arange(sum(LENGTHS)) * 7 % 131
    positions_T = torch.cat([torch.arange(length) for length in LENGTHS])
    pack = tokens_T, positions_T, torch.tensor([0, *LENGTHS]).cumsum(0).int()
    hidden_TH = forward_packed(model, *pack)
    with torch.no_grad():
        assert torch.equal(forward_packed(model, *pack), hidden_TH)
    exact_TV, rounded_TV = (hugging_face_logits(folder, tokens_T, as_) for as_ in (torch.float32, torch.bfloat16))
    error_TV = ((hidden_TH @ lm_head_weight(model).T)[:, :131].float() - exact_TV).abs()
    if dtype is torch.float32:
        assert error_TV.max() < 1e-4
    else:
        usual_TV = (rounded_TV - exact_TV).abs()
        assert error_TV.mean() < 1.5 * usual_TV.mean()
        assert error_TV.max() < 2 * usual_TV.max()
    hidden_TH.sum().backward()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters() if parameter.grad is not None)


@pytest.mark.parametrize("window", [None, 9])
def test_attention_sinks_and_gradients_of_the_flash_kernel(window: int | None):
    """In bfloat16 against the masked attention of equal numbers in float32, whose gradients autograd derives."""
    generator = torch.Generator().manual_seed(2)
    shapes = [(sum(LENGTHS), heads, 64) for heads in (4, 2, 2)] + [(4,)]
    tensors = [torch.randn(shape, generator=generator).bfloat16().cuda() for shape in shapes]
    packed = packed_segments(torch.tensor([0, *LENGTHS]).cumsum(0).int(), None)
    packed.cu_seqlens_q = packed.cu_seqlens_kv = packed.cu_seqlens_q.cuda()
    found = []
    for attend, dtype in ((_attend_flash, torch.bfloat16), (_attend_in_groups, torch.float32)):
        given = [tensor.to(dtype, copy=True).requires_grad_() for tensor in tensors]
        output_TND = attend(*given[:3], packed, None, window, given[3])
        output_TND.float().square().sum().backward()
        found.append([output_TND.detach().float(), *(tensor.grad.float() for tensor in given)])
    for flash, masked in zip(*found, strict=True):
        assert (flash - masked).norm() < 0.02 * masked.norm()


@torch.no_grad()
def hugging_face_logits(folder: Path, tokens_T: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """[T, 131] in float32."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).cuda()
    return torch.cat([model(sequence[None]).logits[0].float() for sequence in tokens_T.cuda().split(LENGTHS)])


@pytest.mark.parametrize("dtype, tolerance", [(torch.bfloat16, 0.06), (torch.float32, 1e-4)])
@pytest.mark.parametrize("window", [None, 9])
def test_answers_see_the_prompt_that_they_share(
    tmp_path: Path, window: int | None, dtype: torch.dtype, tolerance: float
):
    sizes = {"hidden_size": 256, "num_heads": 4, "head_dim": 64, "dtype": dtype}
    folder = make_model(tmp_path, "mistral", window=window, **sizes)
    model = build_model(Architecture.from_folder(folder), tp=1, pp=1, dtype=dtype, max_positions=256, overrides=APART)
    load_hf_weights(model, folder)
    prompt, long, short = torch.arange(sum(LENGTHS[:3])).mul(7).remainder(131).split(LENGTHS[:3])
    starts = torch.tensor([0, *LENGTHS[:3]]).cumsum(0).int()
    seen = torch.tensor([[0, 0], [0, 17], [0, 17]], dtype=torch.int32)
    positions = torch.cat([torch.arange(17), torch.arange(17, 17 + 64), torch.arange(17, 17 + 3)])
    shared_TH = forward_packed(model, torch.cat([prompt, long, short]), positions, starts, seen)
    wholes = torch.cat([prompt, long, prompt, short])
    positions = torch.cat([torch.arange(17 + 64), torch.arange(17 + 3)])
    apart_TH = forward_packed(model, wholes, positions, torch.tensor([0, 81, 101], dtype=torch.int32))
    expected_TH = torch.cat([apart_TH[:81], apart_TH[98:]])
    torch.testing.assert_close(shared_TH, expected_TH, atol=tolerance, rtol=0.03 if dtype is torch.bfloat16 else 0)
    shared_TH.sum().backward()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters() if parameter.grad is not None)
