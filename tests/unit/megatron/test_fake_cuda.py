"""The actor's model forward on tensors that say they are on CUDA and have no numbers: every tensor is where it belongs.

A machine without a GPU takes the branches of CUDA here, the packed flash attention among them, with torch's own rules
of which devices and shapes an operation takes. A tensor that was left on the CPU is an error, as it would be on a GPU;
the last test leaves some there. Elsewhere: numbers, gradients (torch's CPU build has no autograd for CUDA), the head, a
Triton kernel.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial

import pytest
import torch
from hacpo_kernels import backends
from megatron.core.tensor_parallel import random
from memory_trace import _even, _fake_world, _NumbersThatAreKnown
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

from hacpo_mega.megatron.model import attention, layers, linear, moe, rope
from hacpo_mega.megatron.model.model import HiddenStateModel, build_model, forward_packed
from hacpo_mega.models.families.architecture import Architecture
from hacpo_mega.models.families.heads import Heads
from hacpo_mega.models.families.rope import ProportionalRope
from hacpo_mega.models.sharding.layout import Layout

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the real device says more (tests/gpu)")

GPU = torch.device("cuda", 0)
LENGTHS = (17, 1, 46)
SIZES = {
    "num_layers": 2, "hidden_size": 256, "num_heads": 4, "num_kv_heads": 2, "head_dim": 64, "ffn_size": 384,
    "vocab_size": 131, "max_positions": 256, "norm_eps": 1e-6, "rope_theta": 1e4, "rope": None,
}  # fmt: skip
MODELS = {
    "qwen2": Architecture(family="qwen2", tied=True, qkv_bias=True, output_bias=False, qk_norm=False, **SIZES),
    "qwen3": Architecture(family="qwen3", tied=False, qkv_bias=False, output_bias=False, qk_norm=True, **SIZES),
    "llama": Architecture(family="llama", tied=True, qkv_bias=True, output_bias=True, qk_norm=False, **SIZES),
    "gemma3": Architecture(
        family="gemma3_text", tied=True, qkv_bias=False, output_bias=False, qk_norm=True, windows=(8, None),
        window_theta=1e3, query_scalar=32, **SIZES,
    ),
    "gemma4": Architecture(
        family="gemma4_text", tied=True, qkv_bias=False, output_bias=False, qk_norm=True, windows=(8, None),
        window_theta=1e3, query_scalar=1, full_heads=Heads(1, 128, has_values=False), softcap=30.0,
        **SIZES | {"rope": ProportionalRope(0.25)},
    ),
    "qwen3_moe": Architecture(
        family="qwen3_moe", tied=False, qkv_bias=False, output_bias=False, qk_norm=True, num_experts=8,
        experts_per_token=2, expert_ffn=96, **SIZES | {"ffn_size": 0},
    ),
}  # fmt: skip


class _NumbersOnTheCpu(_NumbersThatAreKnown):
    """Literals keep their numbers until they are sent to the device."""

    def __init__(self, fake: FakeTensorMode) -> None:
        super().__init__()
        self.fake = fake

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if (kwargs or {}).get("device") == GPU:
            return func(*tree_map_only(torch.Tensor, self.fake.from_tensor, args), **kwargs)
        return super().__torch_dispatch__(func, types, args, kwargs)


class _WithoutCurrentDevice(TorchFunctionMode):
    """Does without what torch does after a switch to a tensor's device, which its CPU build cannot."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.contiguous and args[0].device == GPU:
            return args[0].clone(memory_format=torch.contiguous_format)
        if func is torch.Tensor.__getitem__ and args[0].device == GPU:
            tensor, places = args
            like = torch.empty_strided(tensor.shape, tensor.stride(), device="meta")[places]
            return tensor.as_strided(like.shape, like.stride(), tensor.storage_offset() + like.storage_offset())
        if func is torch.Tensor.__setitem__ and args[0].device == GPU:
            tensor, places, value = args
            mask = places[0] if isinstance(places, tuple) else places
            return tensor.masked_fill_(mask.reshape(mask.shape + (1,) * (tensor.dim() - mask.dim())), value)
        return func(*args, **(kwargs or {}))


@contextmanager
def on_fake_cuda(tp: int, pp: int, pp_rank: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    layout = Layout(tp, pp, ep=tp)
    with ExitStack() as stack:
        stack.enter_context(_fake_world(layout, 1, rank=pp_rank * tp, has_experts=True))
        patched = stack.enter_context(monkeypatch.context())
        patched.setattr(moe, "_on_host", _even)  # how many tokens each rank's experts have nobody knows
        patched.setattr(moe, "looped_product", None)  # and they are multiplied together
        for room, name in ((rope, "rotate_heads"), (linear, "gated_activation"), (layers, "rms_norm")):
            patched.setattr(room, name, partial(getattr(room, name), backend="reference"))
        patched.setattr(backends, "TRITON", backends.REFERENCE)  # a kernel of Triton has no fake
        patched.setattr(torch.cuda, "is_available", lambda: True)
        patched.setattr(torch.cuda, "current_device", lambda: GPU)
        # Dropout's random stream, of which a model without dropout draws nothing.
        patched.setattr(random, "_get_cuda_rng_state", lambda *_device, **_how: None)
        patched.setattr(random, "_set_cuda_rng_state", lambda *_state, **_how: None)
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        fake = stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        stack.enter_context(_NumbersOnTheCpu(fake))
        stack.enter_context(_WithoutCurrentDevice())
        yield


def build(name: str, tp: int = 1, pp: int = 1) -> HiddenStateModel:
    # Random numbers of a device that is not there could not be drawn; both are overwritten by the folder's.
    overrides = {"perform_initialization": False}
    ep = tp if MODELS[name].has_experts else 1
    model = build_model(MODELS[name], tp=tp, pp=pp, ep=ep, dtype=torch.bfloat16, max_positions=64, overrides=overrides)
    return model.requires_grad_(False)  # Megatron adds residuals under enable_grad, whatever stands around it


def forward(model: HiddenStateModel, tp: int = 1, prefixes_S2: torch.Tensor | None = None) -> torch.Tensor:
    if not model.pre_process:
        model.set_input_tensor(torch.empty(sum(LENGTHS) // tp, 1, 256, dtype=torch.bfloat16, device=GPU))
    positions = torch.tensor([place for length in LENGTHS for place in range(length)])
    starts = torch.tensor([0, 17, 18, 64], dtype=torch.int32)
    with torch.no_grad():
        return forward_packed(model, torch.tensor(range(64)), positions, starts, prefixes_S2)


@pytest.mark.nightly
@pytest.mark.parametrize("tp, pp, pp_rank", [(1, 1, 0), (2, 1, 0), (2, 2, 0), (2, 2, 1)])
@pytest.mark.parametrize("name", MODELS)
def test_everything_is_on_the_device(name, tp, pp, pp_rank, monkeypatch):
    attended = []
    flash = attention._attend_flash
    monkeypatch.setattr(attention, "_attend_flash", lambda *given: attended.append(given[0].device) or flash(*given))
    with on_fake_cuda(tp, pp, pp_rank, monkeypatch):
        model = build(name, tp, pp)
        assert {parameter.device for parameter in model.parameters()} == {GPU}
        hidden = forward(model, tp)
    assert (hidden.device, hidden.dtype) == (GPU, torch.bfloat16)
    assert hidden.shape == ((64, 256) if model.post_process else (64 // tp, 1, 256))
    assert attended == [GPU] * (2 // pp)


def test_prompts_that_answers_share_are_gathered_on_the_device(monkeypatch):
    """The kernel is handed the keys of 17, 17 + 1 and 17 + 46 tokens."""
    met, kernel = [], attention.varlen_attn
    monkeypatch.setattr(
        attention, "varlen_attn", lambda *given, **how: met.append(given[1].shape) or kernel(*given, **how)
    )
    with on_fake_cuda(1, 1, 0, monkeypatch):
        hidden = forward(build("qwen3"), prefixes_S2=torch.tensor([[0, 0], [0, 17], [0, 17]], dtype=torch.int32))
    assert (hidden.device, hidden.shape) == (GPU, (64, 256))
    assert [shape[0] for shape in met] == [17 + 18 + 63] * 2


@pytest.mark.parametrize(
    "forgotten",
    [
        "decoder.layers.0.input_layernorm.weight",
        "decoder.layers.1.self_attention.linear_qkv.weight",
        "decoder.layers.1.mlp.linear_fc2.weight",
        "decoder.final_layernorm.weight",
        "rope_P",
    ],
)
def test_what_is_left_on_the_cpu_is_an_error(forgotten, monkeypatch):
    with on_fake_cuda(1, 1, 0, monkeypatch):
        model = build("qwen3")
        owner, _, name = forgotten.rpartition(".")
        tensor = getattr(model.get_submodule(owner), name)
        left = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
        setattr(model.get_submodule(owner), name, torch.nn.Parameter(left, requires_grad=False) if owner else left)
        message = r"found two different devices|on the same device|weight is on cpu; expected cuda"
        with pytest.raises((RuntimeError, ValueError), match=message):
            forward(model)
