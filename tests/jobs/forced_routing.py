"""Hugging Face's routers, made to send tokens where a routing says."""

import numpy as np
import torch

NOBODY = 255  # what a routing of uint8 says where nobody knows


class Forced:
    """The routers of a Hugging Face model of Qwen3-MoE or Mixtral; while `routing` is None they do as they are.

    A sequence has one token more than its routing, the last one, and may have tokens of which nobody knows.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self.routing: np.ndarray | None = None
        for place, layer in enumerate(model.model.layers):
            layer.mlp.gate.register_forward_hook(
                lambda gate, given, said, place=place: said if self.routing is None else self._sent(gate, said, place)
            )

    def _sent(
        self, gate: torch.nn.Module, said: tuple[torch.Tensor, ...], place: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        logits_TE, _, experts_Tk = said
        told_Tk = torch.from_numpy(self.routing[:, place].astype(np.int64))
        chosen_Tk = torch.where(told_Tk == NOBODY, experts_Tk[: len(told_Tk)], told_Tk)
        experts_Tk = torch.cat([chosen_Tk, experts_Tk[len(told_Tk) :]])
        shares_Tk = logits_TE.softmax(dim=-1).gather(-1, experts_Tk)
        if getattr(gate, "norm_topk_prob", True):
            shares_Tk = shares_Tk / shares_Tk.sum(dim=-1, keepdim=True)
        return logits_TE, shares_Tk, experts_Tk
