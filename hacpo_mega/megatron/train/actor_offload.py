"""Offload of a whole actor outside its agent's turn, for `placement = "shared"`. Bitwise neutral.

Weights, main weights and moments go to the host and come back (offload.py). Gradient buffers are not copied, since
every backward begins by filling them with zeros: their memory is freed and taken again. Megatron's buffers for
gathering are dropped, and the next forward makes new ones.

Not here: turns (agent/devices.py), and the bytes that stay (memory/budget.py).
"""

from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel

from hacpo_mega.megatron.train.optimizer import ActorOptimizer
from hacpo_mega.megatron.train.overlap import buffers_of, finish_gather


class ActorOffload:
    """Offloads all device memory of an actor that was built for it (`Actor(offload_mode="everything")`)."""

    def __init__(self, model: DistributedDataParallel, optimizer: ActorOptimizer) -> None:
        self._model, self._optimizer = model, optimizer
        self._gradients = [buffer.grad_data for buffer in buffers_of(model)]
        self._gradient_originals = [gradient.detach() for gradient in self._gradients]

    def onload(self, *, to_learn: bool) -> None:
        """Onloads the weights; with `to_learn` also gradient buffers, and starts to onload the optimizer's state."""
        self._optimizer.weights.begin_onload()
        if to_learn:
            for gradient, original in zip(self._gradients, self._gradient_originals, strict=True):
                original.untyped_storage().resize_(original.nbytes)
                gradient.data = original
            self._optimizer.offload.begin_onload()
        self._optimizer.weights.ensure_on_device()

    def offload(self) -> None:
        """Offloads everything that is on the device. Collective over the agent's ranks."""
        finish_gather(self._model)
        self._optimizer.weights.begin_offload()
        self._optimizer.offload.begin_offload()
        for gradient, original in zip(self._gradients, self._gradient_originals, strict=True):
            gradient.data = original.new_empty(0)
            original.untyped_storage().resize_(0)
        parallel_state.get_global_memory_buffer().buffer.clear()
        self._optimizer.offload.finish_offload()
        self._optimizer.weights.finish_offload()
