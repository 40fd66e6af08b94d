"""Layers of a live vLLM that quantize what they load, as `vllm = { quantization = "fp8_per_tensor" }` asks for.

Such a layer loads plain numbers and keeps others with their scales. It is given its shard in the plain form and makes
of it, where the old ones lie, what it would have made of a folder at the start. Some kinds add up over the ranks of an
engine how large a matrix is, so that all ranks have to come to a layer, and in one order (Receiver).
It gets vLLM's functions handed in; only engine.py imports vllm. Not here: what a scale is, which vLLM alone decides.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from hacpo_mega.rollout.vllm.host_process import quiet


@dataclass(frozen=True)
class Quantizing:
    """How vLLM's layers quantize.

    methods      of a layer that quantizes what it has loaded: its `quant_method`
    begin, end   puts a layer's tensors on the meta device in the form in which they are loaded, and takes it back
    watch        a layer that has begun takes its weights as soon as its loaders have brought all
    logger       who would say that a layer waits for others
    """

    methods: tuple[type, ...]
    begin: Callable[[nn.Module], None]
    end: Callable[[nn.Module, Any], None]
    watch: Callable[[nn.Module], None]
    logger: logging.Logger

    def takes(self, module: nn.Module, parameter: str) -> bool:
        """Whether what is loaded into this parameter of the layer becomes other numbers."""
        return parameter == "weight" and isinstance(getattr(module, "quant_method", None), self.methods)

    def take(self, module: nn.Module, tensor: Tensor, config: Any) -> None:
        """The layer quantizes the weight `tensor`; `config` is that of the model. Collective over the engine."""
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
    """A loader, in vLLM's words, of what is cut already."""
    param.data.copy_(loaded_weight)
