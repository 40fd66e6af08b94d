"""LoRA written out from its definition, for tests: adapters on a Hugging Face model, whatever layout made them.

y = W x + alpha / rank * B (A x)
"""

import re
from collections.abc import Mapping
from pathlib import Path

import torch
from actor_cases import Oracle
from megatron.core import parallel_state

from hacpo_mega.megatron.actor import Actor
from hacpo_mega.megatron.model.model import unwrapped
from hacpo_mega.megatron.weights.reshard import full_adapters

Factors = Mapping[str, torch.Tensor]
PREFIX = "base_model.model."


class AdaptedOracle(Oracle):
    """A Hugging Face model in float64 with adapters by peft's names beside its matrices."""

    def __init__(self, folder: Path, factors: Factors, scale: float) -> None:
        super().__init__(folder)
        self.model.requires_grad_(False)
        self.factors = {name: tensor.double().requires_grad_() for name, tensor in factors.items()}
        for name, module in self.model.named_modules():
            down, up = (self.factors.get(f"{PREFIX}{name}.lora_{factor}.weight") for factor in "AB")
            if down is not None:
                module.register_forward_hook(
                    lambda _, given, own, down=down, up=up: own + scale * (given[0] @ down.T) @ up.T
                )
        for number, layer in enumerate(self.model.model.layers):
            if hasattr(layer.mlp, "experts"):
                self._adapt_experts(layer.mlp.experts, number, scale)

    def _adapt_experts(self, experts: torch.nn.Module, layer: int, scale: float) -> None:
        """Before every forward their matrices, which transformers has in one parameter, are W + alpha / rank * B A."""
        own = {"gate_up_proj": (("gate_proj", "w1"), ("up_proj", "w3")), "down_proj": (("down_proj", "w2"),)}
        bases = {name: experts._parameters.pop(name) for name in own}

        def product(expert: int, parts: tuple[str, ...]) -> torch.Tensor | float:
            found = re.compile(rf"\.layers\.{layer}\..*\.experts\.{expert}\.({'|'.join(parts)})\.lora_")
            factors = [factor for name, factor in self.factors.items() if found.search(name)]
            return factors[1] @ factors[0] if factors else 0.0

        def adapt(_module: torch.nn.Module, _given: tuple) -> None:
            for name, matrices in own.items():
                stacked = []
                for number, weight in enumerate(bases[name]):
                    parts = zip(weight.chunk(len(matrices)), matrices, strict=True)
                    stacked.append(torch.cat([part + scale * product(number, called) for part, called in parts]))
                setattr(experts, name, torch.stack(stacked))

        experts.register_forward_pre_hook(adapt)

    def gradient(self, loss: torch.Tensor) -> dict[str, torch.Tensor]:
        """d loss / d factor, by peft's names."""
        gradients = torch.autograd.grad(loss, list(self.factors.values()))
        return dict(zip(self.factors, gradients, strict=True))


def factors_of(actor: Actor) -> dict[str, torch.Tensor]:
    """All adapters of the whole model, by peft's names. Collective over the cell."""
    return {name: tensor.to("cpu", copy=True) for name, tensor in full_adapters(unwrapped(actor.model))}


def is_first_cell() -> bool:
    return parallel_state.get_data_parallel_rank(with_context_parallel=True) == 0
