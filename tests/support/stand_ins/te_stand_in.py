"""TransformerEngine's interface, as far as Megatron's spec of its layers uses it, and what is asked of it on the CPU.

The four classes declare what TransformerEngine declares: __init__ and forward have the parameters, in their order and
with their defaults, of release 2.17.1 (signatures.json, held by tests/unit/house/test_signatures.py). 2.14 lacks the
name and the score_mods of attention; 2.19 has more arguments of its forward, and queries, keys and values by default
None. So an argument that Megatron gives and TransformerEngine does not know is a TypeError here, too. The parameters of
a module, their names and shapes are read from the source of 2.9.

A forward computes its definition in a few lines of torch, in one process: it shows that weights are where they
belong and that attention is told where sequences begin. It shows nothing of TransformerEngine's numbers.
`python te_stand_in.py FOLDER` answers for every model folder below FOLDER/models, into FOLDER/found.pt, and for every
plan in FOLDER/plans.pickle what it takes of memory (te_memory.py), into FOLDER/traces.pickle.
"""

import importlib.abc
import importlib.machinery
import importlib.metadata
import pickle
import sys
import types
from contextlib import nullcontext
from pathlib import Path

import torch
from torch.nn.functional import linear, rms_norm, scaled_dot_product_attention

VERSION = "2.17.1"
# Megatron does without these: a class that no TransformerEngine up to 2.20 has there; optimizers (it takes torch's).
NOT_THERE = ("_SplitAlongDim", "optimizers")
# class -> what it was made with, by name, in order
MADE: dict[str, list[dict]] = {}


def _parameter(*shape: int, dtype: torch.dtype) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.full(shape, torch.nan, device="cpu", dtype=dtype))


class Linear(torch.nn.Module):
    """module/linear.py."""

    def __init__(self, in_features, out_features, sequence_parallel=False, fuse_wgrad_accumulation=False, tp_group=None,
                 tp_size=1, get_rng_state_tracker=None, rng_tracker_name=None, init_method=None, bias=True,
                 return_bias=False, params_dtype=None, parallel_mode=None, parameters_split=None, device="cuda",
                 ub_overlap_ag=False, ub_overlap_rs=False, ub_overlap_rs_dgrad=False, ub_bulk_dgrad=False,
                 ub_bulk_wgrad=False, ub_name=None, delay_wgrad_compute=False, symmetric_ar_type=None,
                 save_original_input=False, name=None):  # fmt: skip
        given = {key: value for key, value in locals().items() if key not in ("self", "__class__")}
        super().__init__()
        MADE.setdefault("Linear", []).append(given)
        shards = tp_size if tp_group is None else tp_group.size()
        rows = out_features // shards if parallel_mode == "column" else out_features
        columns = in_features // shards if parallel_mode == "row" else in_features
        self.weight = _parameter(rows, columns, dtype=params_dtype)
        self.bias = _parameter(rows, dtype=params_dtype) if bias else torch.Tensor()
        if bias and parallel_mode == "row":
            self.bias.sequence_parallel = shards > 1 and sequence_parallel
        self.use_bias, self.return_bias = bias, return_bias
        self.gathers = shards if sequence_parallel else 1

    def forward(self, inp, is_first_microbatch=None, fp8_output=False, fp8_grad=False):
        added = self.bias if self.use_bias and not self.return_bias else None
        out = linear(inp, self.weight, added)
        return (out, self.bias) if self.return_bias else out


class LayerNormLinear(torch.nn.Module):
    """module/layernorm_linear.py."""

    def __init__(self, in_features, out_features, eps=1e-5, sequence_parallel=False, fuse_wgrad_accumulation=False,
                 tp_group=None, tp_size=1, get_rng_state_tracker=None, init_method=None, bias=True,
                 normalization="LayerNorm", return_bias=False, params_dtype=None, parallel_mode=None,
                 return_layernorm_output=False, return_layernorm_output_gathered=False, parameters_split=None,
                 zero_centered_gamma=False, device="cuda", ub_overlap_ag=False, ub_overlap_rs=False,
                 ub_overlap_rs_dgrad=False, ub_bulk_wgrad=False, ub_bulk_dgrad=False, ub_name=None,
                 delay_wgrad_compute=False, symmetric_ar_type=None, name=None):  # fmt: skip
        given = {key: value for key, value in locals().items() if key not in ("self", "__class__")}
        super().__init__()
        MADE.setdefault("LayerNormLinear", []).append(given)
        shards = tp_size if tp_group is None else tp_group.size()
        assert (normalization, parallel_mode) == ("RMSNorm", "column")
        self.layer_norm_weight = _parameter(in_features, dtype=params_dtype)
        self.layer_norm_weight.sequence_parallel = shards > 1 and sequence_parallel
        self.layer_norm_bias = None
        self.weight = _parameter(out_features // shards, in_features, dtype=params_dtype)
        self.bias = _parameter(out_features // shards, dtype=params_dtype) if bias else torch.Tensor()
        self.eps, self.use_bias, self.return_bias = eps, bias, return_bias
        self.gathers = shards if sequence_parallel else 1

    def forward(self, inp, is_first_microbatch=None, fp8_output=False, fp8_grad=False):
        normed = rms_norm(inp, inp.shape[-1:], self.layer_norm_weight, self.eps)
        added = self.bias if self.use_bias and not self.return_bias else None
        out = linear(normed, self.weight, added)
        return (out, self.bias) if self.return_bias else out


class RMSNorm(torch.nn.Module):
    """module/rmsnorm.py; its `kwargs` go on to ops/basic/rmsnorm.py, which takes device, dtype and sm_margin."""

    def __init__(self, normalized_shape=None, eps=1e-5, sequence_parallel=None, params_dtype=None,
                 zero_centered_gamma=False, hidden_size=None, **kwargs):  # fmt: skip
        given = {key: value for key, value in locals().items() if key not in ("self", "__class__", "kwargs")} | kwargs
        super().__init__()
        assert kwargs.keys() <= {"device", "dtype", "sm_margin"}, kwargs
        assert (normalized_shape is None) != (hidden_size is None)
        MADE.setdefault("RMSNorm", []).append(given)
        self.weight = _parameter(normalized_shape or hidden_size, dtype=params_dtype)
        self.weight.sequence_parallel = sequence_parallel
        self.eps = eps

    def forward(self, inp):
        return rms_norm(inp, inp.shape[-1:], self.weight, self.eps)


class DotProductAttention(torch.nn.Module):
    """attention/dot_product_attention/dot_product_attention.py."""

    def __init__(self, num_attention_heads, kv_channels, num_gqa_groups=None, attention_dropout=0.0, qkv_format="sbhd",
                 attn_mask_type="causal", window_size=None, bottom_right_diagonal=None, sequence_parallel=False,
                 tp_size=1, get_rng_state_tracker=None, tp_group=None, layer_number=None, attention_type="self",
                 cp_group=None,
                 cp_global_ranks=None, cp_stream=None, cp_comm_type="p2p", softmax_scale=None, softmax_type="vanilla",
                 return_max_logit=False, name=None):  # fmt: skip
        given = {key: value for key, value in locals().items() if key not in ("self", "__class__")}
        super().__init__()
        MADE.setdefault("DotProductAttention", []).append(given)
        self.softmax_scale = softmax_scale

    def forward(self, query_layer, key_layer, value_layer, attention_mask=None, qkv_format=None, cu_seqlens_q=None,
                cu_seqlens_kv=None, cu_seqlens_q_padded=None, cu_seqlens_kv_padded=None, max_seqlen_q=None,
                max_seqlen_kv=None, attn_mask_type=None, window_size=None, bottom_right_diagonal=None,
                checkpoint_core_attention=False, core_attention_bias_type="no_bias", core_attention_bias=None,
                alibi_slopes=None, fast_zero_fill=True, inference_params=None, pad_between_seqs=None, fp8_output=False,
                num_splits=1, score_mod=None, score_mod_bprop=None, score_mod_tensors=None,
                score_mod_bprop_tensors=None):  # fmt: skip
        """Only what the source says of thd: three dimensions, a padding mask, int32 starts; answers [T, N * D]."""
        assert (qkv_format, attn_mask_type, attention_mask) == ("thd", "padding_causal", None)
        assert cu_seqlens_q_padded is cu_seqlens_kv_padded is window_size is core_attention_bias is None
        assert all(layer.dim() == 3 for layer in (query_layer, key_layer, value_layer))
        for starts, longest in ((cu_seqlens_q, max_seqlen_q), (cu_seqlens_kv, max_seqlen_kv)):
            assert starts.dtype == torch.int32 and starts[-1] == len(query_layer) and type(longest) is int
            assert longest == starts.diff().max()
        parts = (layer.split(cu_seqlens_q.diff().tolist()) for layer in (query_layer, key_layer, value_layer))
        return torch.cat([self._sequence(*part) for part in zip(*parts)]).flatten(1)

    def _sequence(self, *layers):
        query, key, value = (layer.transpose(0, 1)[None] for layer in layers)
        scale = self.softmax_scale
        return scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale, enable_gqa=True)[
            0
        ].transpose(0, 1)


def get_cpu_offload_context(enabled=False, num_layers=1, model_layers=1, offload_activations=True,
                            offload_weights=False, double_buffering=False, manual_synchronization=False,
                            retain_pinned_cpu_buffers=False, offload_stream=None):  # fmt: skip
    """cpu_offload.py, as Megatron's block of layers calls it: without offloading."""
    assert not enabled and (offload_weights or offload_activations)
    return nullcontext(), lambda tensor: tensor


class _Named(type):
    """A class that is named and never made: what Megatron mentions of parts that this project does not use."""

    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return _Named(name, (), {})

    def __call__(cls, *args, **kwargs):
        raise AssertionError(f"{cls.__name__} of TransformerEngine is not declared in {__file__}")


def _named_part(name):
    """Looks up a name of a module of the package."""
    if name in NOT_THERE:
        raise AttributeError(name)
    return _Named.__getattr__(None, name)


def get_dummy_wgrad(shape, dtype, zero=False):
    """module/base.py: what autograd is handed for a gradient that is in its sum already."""
    return torch.zeros(shape, dtype=dtype) if zero else torch.empty(shape, dtype=dtype)


class _Described(importlib.metadata.Distribution):
    """The metadata that pip would have written of the package."""

    def read_text(self, filename):
        return f"Name: transformer-engine\nVersion: {VERSION}\n" if filename == "METADATA" else None

    def locate_file(self, path):
        return Path(path)


class _Package(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """The package: every module that Megatron imports of it is there and names whatever is asked of it."""

    def find_spec(self, fullname, path=None, target=None):
        if fullname.partition(".")[0] != "transformer_engine" or fullname.rpartition(".")[2] in NOT_THERE:
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def find_distributions(self, context):
        return [_Described()] if context.name == "transformer-engine" else []

    def create_module(self, spec):
        module = types.ModuleType(spec.name)
        module.__getattr__ = _named_part
        return module

    def exec_module(self, module):
        if module.__name__ == "transformer_engine":
            module.__version__ = VERSION
        if module.__name__ == "transformer_engine.pytorch.cpu_offload":
            module.get_cpu_offload_context = get_cpu_offload_context
        if module.__name__ == "transformer_engine.pytorch.module.base":
            module.get_dummy_wgrad = get_dummy_wgrad
        if module.__name__ == "transformer_engine.pytorch":
            for declared in (Linear, LayerNormLinear, RMSNorm, DotProductAttention):
                setattr(module, declared.__name__, declared)


def install() -> None:
    """Makes `import transformer_engine` find this file's classes. Megatron must not have been imported yet."""
    assert "megatron.core" not in sys.modules
    sys.meta_path.insert(0, _Package())


if __name__ == "__main__":
    install()
    # The modules imported below import the stand-in by its name, and must get the classes that Megatron found.
    sys.modules["te_stand_in"] = sys.modules["__main__"]
    from te_job import answer
    from te_memory import traces

    folder = Path(sys.argv[1])
    answer(folder, MADE)
    (folder / "traces.pickle").write_bytes(pickle.dumps(traces(pickle.loads((folder / "plans.pickle").read_bytes()))))
