"""Layers of a live vLLM that quantize the weights they load, as `vllm = { quantization = "fp8_per_tensor" }` asks for.

Such a layer loads plain numbers and keeps others with their scales. It gets its shard in the plain form and quantizes
it in place, as it would have done from a folder at the start. Some kinds reduce the largest number over the ranks of an
engine, so all ranks have to reach a layer, in one order (Receiver).
vLLM's functions are passed in; only engine.py and patches.py import it. Not here: the scales, which vLLM alone decides.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from hacpo_mega.rollout.vllm.host_process import quiet


@dataclass(frozen=True)
class Quantizing:
    """vLLM's functions and classes for quantization at load.

    methods      the `quant_method` classes of layers that quantize what they have loaded
    begin, end   put a layer's tensors on the meta device in the form in which they are loaded, and take it back
    watch        makes a layer that has begun take its weights as soon as its loaders have brought all
    logger       the logger that would report a layer that waits for others
    """

    methods: tuple[type, ...]
    begin: Callable[[nn.Module], None]
    end: Callable[[nn.Module, Any], None]
    watch: Callable[[nn.Module], None]
    logger: logging.Logger

    def takes(self, module: nn.Module, parameter: str) -> bool:
        """True if the layer quantizes what is loaded into this parameter."""
        return parameter == "weight" and isinstance(getattr(module, "quant_method", None), self.methods)

    def take(self, module: nn.Module, tensor: Tensor, config: Any) -> None:
        """Quantizes the weight `tensor` [out, in] into the layer; `config` is the model's.

        Collective over the engine.
        """
        with quiet(self.logger):
            self.begin(module)
            parameter, loader = module.weight, module.weight.weight_loader
            parameter.weight_loader = _whole
            self.watch(module)
            try:
                parameter.weight_loader(parameter, tensor)
            finally:
                self.end(module, config)
                parameter.weight_loader = loader  # vLLM keeps the parameter on the meta device for the next time


def _whole(param: Tensor, loaded_weight: Tensor) -> None:
    """A weight loader, in vLLM's form, for a tensor that is cut already."""
    param.data.copy_(loaded_weight)
