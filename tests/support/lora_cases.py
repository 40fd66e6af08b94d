"""LoRA written out from its definition, for tests: adapters on a Hugging Face model, whatever layout made them.

y = W x + alpha / rank * B (A x)
"""

from collections.abc import Mapping
from pathlib import Path

import torch
from actor_cases import Oracle
from megatron.core import parallel_state

from hacpo_mega.megatron.actor import Actor
from hacpo_mega.megatron.model import unwrapped
from hacpo_mega.megatron.reshard import full_adapters

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

    def gradient(self, loss: torch.Tensor) -> dict[str, torch.Tensor]:
        """d loss / d factor, by peft's names."""
        gradients = torch.autograd.grad(loss, list(self.factors.values()))
        return dict(zip(self.factors, gradients, strict=True))


def factors_of(actor: Actor) -> dict[str, torch.Tensor]:
    """All adapters of the whole model, by peft's names. Collective over the cell."""
    return {name: tensor.to("cpu", copy=True) for name, tensor in full_adapters(unwrapped(actor.model))}


def is_first_cell() -> bool:
    return parallel_state.get_data_parallel_rank(with_context_parallel=True) == 0
