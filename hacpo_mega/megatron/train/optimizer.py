"""Adam for an actor: Megatron's distributed optimizer, clipping by the global norm, the learning-rate schedule,
and the offload of a whole actor.

The learning rate is a pure function of the update's number, so a resumed run needs only the count of its updates.

Elsewhere: gradients (schedule.py), checkpoints (sharded_state.py).
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import ChainedOptimizer, get_megatron_optimizer
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import MixedPrecisionOptimizer

from hacpo_mega.config import OptimizerConfig
from hacpo_mega.megatron.train.fused_optimizer import VERSIONS, chosen_kernels, use_kernels
from hacpo_mega.megatron.train.offload import Offload
from hacpo_mega.megatron.train.overlap import buffers_of, finish_gather

# Offloadable part of an actor: nothing, its gradient buffers, these and the optimizer's state, or everything.
OffloadMode = Literal["nothing", "gradients", "state", "everything"]


def learning_rate(config: OptimizerConfig, update: int, total_updates: int) -> float:
    """Learning rate of update number `update` (from 0) of `total_updates`.

    Warm-up rises linearly and reaches `lr` at update `warmup_updates - 1`: no update is wasted at rate 0. Then
    `constant` stays; `linear` and `cosine` fall to `min_lr_ratio * lr`, which the update after the last would have.
    """
    if update < config.warmup_updates:
        return config.lr * (update + 1) / config.warmup_updates
    if config.schedule == "constant":
        return config.lr
    done = (update - config.warmup_updates) / max(1, total_updates - config.warmup_updates)
    done = min(done, 1.0)
    kept = 1.0 - done if config.schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))
    return config.lr * (config.min_lr_ratio + (1.0 - config.min_lr_ratio) * kept)


@dataclass(frozen=True)
class OptimizerStep:
    """Result of one optimizer step.

    `grad_norm` is over the whole model, before clipping; `applied` is false if it or the loss was not finite and the
    parameters stayed unchanged.
    """

    grad_norm: float
    lr: float
    applied: bool


@dataclass(frozen=True)
class ParameterShare:
    """This rank's share of a parameter in the optimizer: the numbers start:stop of it, flattened.

    state   [stop - start] each, by torch's names: `param` (the main weight) and, once there are moments, `exp_avg` and
            `exp_avg_sq`; no copies, unless they are offloaded (offload.py): then the host copies, read-only
    """

    start: int
    stop: int
    state: dict[str, torch.Tensor]


class ActorOptimizer:
    """Megatron's distributed Adam over one wrapped model: fp32 moments and main weights, sharded over data parallel."""

    def __init__(
        self,
        model: DistributedDataParallel,
        config: OptimizerConfig,
        total_updates: int,
        *,
        offload_mode: OffloadMode = "nothing",
    ) -> None:
        """`offload_mode` is the offloadable part; `self.offload` moves gradient buffers and the optimizer's state.

        An offloadable state has moments from the start. Everything includes the model's weights (`self.weights`;
        `ActorOffload`).
        """
        self.config = config
        self.total_updates = total_updates
        self.num_updates = self.num_applied = 0
        self.kernels = chosen_kernels(config.kernels, on_cuda=torch.cuda.is_available())
        use_kernels(self.kernels)
        self.megatron = get_megatron_optimizer(_megatron_config(model, config), [model], use_gloo_process_groups=False)
        # wd_mult is Megatron's own choice of what decays (matrices, not norms and biases); its scheduler, which would
        # apply it, is not used.
        for group in self.megatron.param_groups:
            group["weight_decay"] = config.weight_decay * group["wd_mult"]
            if self.kernels == "torch":
                group["fused"] = True  # one pass over the state; by itself torch takes several, with temporaries
        offloads_state = offload_mode in ("state", "everything")
        if offloads_state:
            self.make_moments()  # so that the host's memory is taken now, not in the first step
        gradients = [buffer.grad_data for buffer in buffers_of(model)] if offload_mode != "nothing" else []
        self.offload = Offload(self._own_state() if offloads_state else (), scratch=gradients)
        # The main weights of a float32 model are views of its buffers, too; what is frozen is in no buffer.
        # A router's bias, float32 and a few numbers, stays.
        frozen = [p for p in model.parameters() if not p.requires_grad and p.dtype is model.config.params_dtype]
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        main = (tensor for part in self.parts for group in part.shard_fp32_groups for tensor in group)
        whole = [*(buffer.param_data for buffer in buffers_of(model)), *frozen]
        self.weights = Offload(whole, [*trained, *main], "the model") if offload_mode == "everything" else Offload(())

    @property
    def summary(self) -> str:
        """Adam implementation with its version, for the startup log."""
        return f"Adam of {VERSIONS[self.kernels]}"

    @property
    def parts(self) -> list[DistributedOptimizer]:
        """Distributed optimizers of Megatron's chain; experts have one of their own, sharded over other ranks."""
        return self.megatron.chained_optimizers

    def make_moments(self) -> None:
        """Allocates Adam's moments as zeros, if no update has yet; parameters stay unchanged."""
        without = [part for part in self.parts if not part.optimizer.state]
        if not without:
            return
        for group in self.megatron.param_groups:
            group["lr"] = 0.0
        for part in without:
            part._init_optimizer_states_with_dummy_values()
        self.set_progress(self.num_updates, self.num_applied)

    def _own_state(self) -> list[torch.Tensor]:
        """State outside the model's buffers: main weights of half-precision parameters, and the moments."""
        groups = [group for part in self.parts for group in part.shard_fp32_from_float16_groups]
        main = [tensor for group in groups for tensor in group]
        # torch counts Adam's steps in tensors of no dimension, which stay where they are
        states = [tensor for state in self._states() for tensor in state.values()]
        return main + [tensor for tensor in states if isinstance(tensor, torch.Tensor) and tensor.dim()]

    def _states(self) -> Iterator[dict[str, Any]]:
        """Adam's state of every parameter that this rank has a share of."""
        return (state for part in self.parts for state in part.optimizer.state.values())

    def share_of(self, parameter: torch.nn.Parameter) -> ParameterShare | None:
        """This rank's share of a parameter's state; None if it has none."""
        part = next((part for part in self.parts if parameter in part.model_param_gbuf_map), None)
        if part is None:
            return None
        numbers = part._get_model_param_range_map(parameter)["param"]
        group, place = part.model_param_group_index_map[parameter]
        main = part.optimizer.param_groups[group]["params"][place]
        state = {"param": main, **part.optimizer.state.get(main, {})}
        state = {kind: self.weights.readable(self.offload.readable(tensor)) for kind, tensor in state.items()}
        return ParameterShare(numbers.start, numbers.end, state)

    def spread_main_weights(self, model: DistributedDataParallel) -> None:
        """Rounds the main weights into the model's own, whole on all ranks. Collective over the agent."""
        self.offload.ensure_on_device()
        for part in self.parts:
            part._copy_main_params_to_model_params()
        model.start_param_sync(force_sync=True)

    def set_progress(self, num_updates: int, num_applied: int) -> None:
        """Sets the counts behind the learning rate (updates) and Adam's bias correction (applied updates)."""
        self.num_updates, self.num_applied = num_updates, num_applied
        # torch's Adam counts in every parameter's state, the fused ones in the group.
        for state in self._states():
            if "step" in state:
                state["step"].fill_(num_applied)
        for group in self.megatron.param_groups:
            if "step" in group:
                group["step"] = num_applied

    def counted_gradients(self) -> list[torch.Tensor]:
        """Gradients in the model's buffers that this rank counts: over all ranks every element of the model once.

        Megatron selects them, as for the norm: this rank's data-parallel shard, without copies on other tensor ranks
        and without the tied head of another stage. Flat fp32 views, valid until the buffers are filled again.
        """
        self.offload.ensure_on_device()  # Megatron pairs every gradient with its main weight
        self.megatron.prepare_grads()
        return [gradient for part in self.parts for gradient in part.get_grads_for_grad_norm()]

    def sum_over_model(self, values: torch.Tensor) -> torch.Tensor:
        """Sums a tensor, in place, over the ranks that share `counted_gradients`. Collective over the agent."""
        torch.distributed.all_reduce(values, group=self.megatron.get_grad_stats_parallel_group())
        return values

    def step(self, loss: float) -> OptimizerStep:
        """Applies the gradients in the model's buffers, unless they or the update's `loss` are not finite.

        Collective over the agent's ranks, which all pass the same loss. The norm is all-reduced, so all ranks skip
        together. Skipped updates still advance the LR schedule. RuntimeError while the state is offloaded (offload.py).
        """
        self.offload.ensure_on_device()
        lr = learning_rate(self.config, self.num_updates, self.total_updates)
        self.num_updates += 1
        for group in self.megatron.param_groups:
            group["lr"] = lr
        grad_norm, applied = _clipped_step(self.megatron, self.config.clip_grad, loss)
        self.num_applied += applied
        return OptimizerStep(grad_norm=grad_norm, lr=lr, applied=applied)


def _megatron_config(model: DistributedDataParallel, config: OptimizerConfig) -> MegatronOptimizerConfig:
    dtype = model.config.params_dtype
    return MegatronOptimizerConfig(
        optimizer="adam",
        lr=config.lr,
        min_lr=config.lr * config.min_lr_ratio,
        weight_decay=config.weight_decay,
        adam_beta1=config.betas[0],
        adam_beta2=config.betas[1],
        adam_eps=config.eps,
        clip_grad=config.clip_grad,
        bf16=dtype == torch.bfloat16,
        params_dtype=dtype,
        use_distributed_optimizer=True,
    )


def _clipped_step(optimizer: ChainedOptimizer, clip_grad: float, loss: float) -> tuple[float, bool]:
    """Megatron's own `step`, taken apart: without a loss scaler it would apply a gradient full of NaN.

    Returns the norm before clipping and whether the step was applied.
    """
    found_inf = optimizer.prepare_grads()
    assert not found_inf, "there is no loss scaler that could have looked for infinities"
    grad_norm = float(optimizer.get_grad_norm())
    if not (math.isfinite(grad_norm) and math.isfinite(loss)):
        return grad_norm, False
    for part in optimizer.chained_optimizers:
        # A rank may own no parameter of a part: more data-parallel ranks than the part has shards.
        if part.get_parameters():
            clip_grad_by_total_norm_fp32(part.get_parameters(), clip_grad, grad_norm)
    *others, last = optimizer.chained_optimizers
    for part in others:
        MixedPrecisionOptimizer.step_with_ready_grads(part)  # its own would gather the weights of the whole model
    last.step_with_ready_grads()
    return grad_norm, True


class ActorOffload:
    """Offload of all device memory of an actor outside its agent's turn, for `placement = "shared"`. Bitwise neutral.

    The actor is built for it (`ActorSpec(offload_mode="everything")`). Weights, main weights and moments go to the host
    and come back, gradient buffers are freed and taken again (offload.py). Megatron's buffers for gathering are
    dropped, and the next forward makes new ones. Elsewhere: turns (agent/devices.py), and the bytes that stay
    (memory/budget.py).
    """

    def __init__(self, model: DistributedDataParallel, optimizer: ActorOptimizer) -> None:
        self._model, self._optimizer = model, optimizer

    def onload(self, *, to_learn: bool) -> None:
        """Onloads the weights; with `to_learn` also gradient buffers, and starts to onload the optimizer's state."""
        self._optimizer.weights.begin_onload()
        if to_learn:
            self._optimizer.offload.begin_onload()
        self._optimizer.weights.ensure_on_device()

    def offload(self) -> None:
        """Offloads everything that is on the device. Collective over the agent's ranks."""
        finish_gather(self._model)
        self._optimizer.weights.begin_offload()
        self._optimizer.offload.begin_offload()
        parallel_state.get_global_memory_buffer().buffer.clear()
        self._optimizer.offload.finish_offload()
        self._optimizer.weights.finish_offload()
