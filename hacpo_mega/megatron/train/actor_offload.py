"""An actor that is on its device in its agent's turn alone: asked for by `placement = "shared"`, changes no bit.

Weights, main weights and moments go to the host and come back (offload.py). Gradient buffers are not copied, since
every backward begins by filling them with zeros: their bytes are given back and taken again. What Megatron keeps from
one forward to the next to gather into is made anew by the next one.
Not here: whose turn it is (agent/devices.py), and how many bytes stay all the same (memory/budget.py).
"""

from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel

from hacpo_mega.megatron.train.optimizer import ActorOptimizer
from hacpo_mega.megatron.train.overlap import buffers_of, finish_gather


class ActorOffload:
    """All that an actor keeps on its device, of one that was built to leave it (`Actor(leaves="everything")`)."""

    def __init__(self, model: DistributedDataParallel, optimizer: ActorOptimizer) -> None:
        self._model, self._optimizer = model, optimizer
        self._gradients = [buffer.grad_data for buffer in buffers_of(model)]
        self._gradients_at_home = [gradient.detach() for gradient in self._gradients]

    def come(self, *, to_learn: bool) -> None:
        """The weights are on the device; `to_learn`, too, gradient buffers, and the optimizer's state on its way."""
        self._optimizer.weights.start_returning()
        if to_learn:
            for gradient, home in zip(self._gradients, self._gradients_at_home, strict=True):
                home.untyped_storage().resize_(home.nbytes)
                gradient.data = home
            self._optimizer.offload.start_returning()
        self._optimizer.weights.require_home()

    def leave(self) -> None:
        """Nothing of it is on the device; what has left already stays away. Collective over the agent's ranks."""
        finish_gather(self._model)
        self._optimizer.weights.start_leaving()
        self._optimizer.offload.start_leaving()
        for gradient, home in zip(self._gradients, self._gradients_at_home, strict=True):
            gradient.data = home.new_empty(0)
            home.untyped_storage().resize_(0)
        parallel_state.get_global_memory_buffer().buffer.clear()
        self._optimizer.offload.finish_leaving()
        self._optimizer.weights.finish_leaving()
