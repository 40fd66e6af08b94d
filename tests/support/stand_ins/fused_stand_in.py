"""The optimizers' interface of TransformerEngine and apex, and what is asked of it on the CPU.

The classes declare what the libraries declare (signatures.json, held by tests/unit/house/test_signatures.py); functions
that are compiled take their arguments by place, as their bindings do. They compute the definition: Adam with
decoupled weight decay whose steps are counted in the group, a norm, a product. It shows that Megatron is given them and
that state travels; nothing of the libraries' numbers. `python fused_stand_in.py FOLDER` trains FOLDER/model with each
and writes FOLDER/found.pt (see `answer`).
"""

import importlib.metadata
import sys
import types
from collections import Counter
from pathlib import Path

import te_stand_in
import torch

APEX = "0.1"
CALLED: Counter[str] = Counter()  # (library, kernel), by name


class _Adam(torch.optim.Optimizer):
    """Adam as both libraries' first lines define it, in float32."""

    library = ""

    def __init__(self, params, **defaults):
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure=None, grad_scaler=None):
        assert closure is grad_scaler is None
        CALLED[f"{self.library} adam"] += 1
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            (beta1, beta2), count = group["betas"], group["step"]
            for parameter in (given for given in group["params"] if given.grad is not None):
                state = self.state[parameter]
                for name in () if state else ("exp_avg", "exp_avg_sq"):
                    state[name] = torch.zeros_like(parameter, dtype=torch.float32)
                state["exp_avg"].lerp_(parameter.grad, 1 - beta1)
                state["exp_avg_sq"].lerp_(parameter.grad.square(), 1 - beta2)
                root = (state["exp_avg_sq"] / (1 - beta2**count)).sqrt() + group["eps"]
                change = state["exp_avg"] / (1 - beta1**count) / root + group["weight_decay"] * parameter
                parameter.sub_(group["lr"] * change)


class TEAdam(_Adam):
    """transformer_engine.pytorch.optimizers.FusedAdam."""

    library = "te"

    def __init__(self, params, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0, amsgrad=False, *,
                 bias_correction=True, adam_w_mode=True, capturable=False, master_weights=False,
                 master_weight_dtype=torch.float32, exp_avg_dtype=torch.float32, exp_avg_sq_dtype=torch.float32,
                 use_decoupled_grad=False, store_param_remainders=False, set_grad_none=None):  # fmt: skip
        assert adam_w_mode and bias_correction and not (amsgrad or capturable or master_weights or use_decoupled_grad)
        super().__init__(params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)


class ApexAdam(_Adam):
    """apex.optimizers.FusedAdam."""

    library = "apex"

    def __init__(self, params, lr=1e-3, bias_correction=True, betas=(0.9, 0.999), eps=1e-8, adam_w_mode=True,
                 weight_decay=0.0, amsgrad=False, set_grad_none=True, capturable=False,
                 master_weights=False):  # fmt: skip
        assert adam_w_mode and bias_correction and not (amsgrad or capturable or master_weights)
        super().__init__(params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)


class MultiTensorApply:
    """`multi_tensor_applier` of both: an object that is called."""

    def __call__(self, op, noop_flag_buffer, tensor_lists, *args):
        return op(2048 * 32, noop_flag_buffer, tensor_lists, *args)


def _kernels(library):
    """The two compiled functions of a library, by place alone."""

    def multi_tensor_l2norm(chunk_size, noop_flag, tensor_lists, per_tensor, /):
        CALLED[f"{library} l2norm"] += 1
        assert noop_flag.dtype == torch.int32 and not per_tensor
        squares = [tensor.square().sum() for (tensors,) in [tensor_lists] for tensor in tensors]
        return torch.stack(squares).sum().sqrt()[None], torch.empty(0)

    def multi_tensor_scale(chunk_size, noop_flag, tensor_lists, scale, /):
        CALLED[f"{library} scale"] += 1
        for source, target in zip(*tensor_lists, strict=True):
            target.copy_(source * scale)

    return {"multi_tensor_l2norm": multi_tensor_l2norm, "multi_tensor_scale": multi_tensor_scale}


class _Apex(importlib.metadata.Distribution, importlib.metadata.DistributionFinder):
    """The metadata that pip would have written of apex."""

    def read_text(self, filename):
        return f"Name: apex\nVersion: {APEX}\n" if filename == "METADATA" else None

    def locate_file(self, path):
        return Path(path)

    def find_spec(self, fullname, path=None, target=None):
        return None

    def find_distributions(self, context):
        return [self] if context.name == "apex" else []


def _module(name, **content):
    module = types.ModuleType(name)
    vars(module).update(content)
    sys.modules[name] = module
    return module


def install() -> None:
    """Makes both libraries' optimizers importable. Megatron must not have been imported yet."""
    te_stand_in.install()
    applier = MultiTensorApply()
    te = {"FusedAdam": TEAdam, "FusedSGD": torch.optim.SGD, "multi_tensor_applier": applier, **_kernels("te")}
    _module("transformer_engine.pytorch.optimizers", **te)
    _module("amp_C", **_kernels("apex"))
    parts = {
        "optimizers": _module("apex.optimizers", FusedAdam=ApexAdam, FusedSGD=torch.optim.SGD),
        "multi_tensor_apply": _module("apex.multi_tensor_apply", multi_tensor_applier=applier),
    }
    _module("apex", __path__=[], **parts)
    sys.meta_path.insert(0, _Apex())


if __name__ == "__main__":
    install()
    # The modules imported below import this file by its name, and must get the classes that Megatron found.
    sys.modules["fused_stand_in"] = sys.modules["__main__"]
    from fused_job import answer

    answer(Path(sys.argv[1]), CALLED)
