"""Tensors of an actor in host memory while the engine generates; changes no bit.

`agents.offload` sends away all that only an optimizer step reads: the float32 main weights that are copies of
half-precision ones, and both moments of Adam. Main weights that are views of the model's own, as with a float32 model,
stay with it. `placement = "shared"` sends all of an actor away (actor_offload.py).

    start_leaving      copies to the host begin; the state may still be read, not written
    finish_leaving     they are done; the bytes are the device's again
    start_returning    copies to the device begin
    require_home       the device's work from here on waits for them; the state is there

On CUDA the copies run on a stream of their own through pinned memory, beside what the device and the process do
meanwhile: out beside publishing, back beside judging, exchanging and scoring (agent/devices.py). On the CPU they are
done when they begin, and the bytes are given back and taken again all the same.

Why not Megatron's own (core 0.16.1): `MegatronOptimizer.offload_to_cpu` and `restore_from_cpu` wait for every copy, use
pageable memory that they allocate anew each time, do nothing for a tensor that is on the CPU, and give every tensor
another storage: a view of a float32 model's weights comes back as a second copy of them, and other views read what was
before. `optimizer_cpu_offload` (HybridDeviceOptimizer) takes the optimizer step itself to the CPU. Here every
tensor keeps its storage, whose bytes go and come, so that whatever views it finds its numbers again.
Not here: when (agent/devices.py), and how many bytes that is (memory/actor_bytes.py).
"""

import enum
import weakref
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.cuda._pin_memory_utils import pin_memory, unpin_memory


class Where(enum.Enum):
    """Where the tensors are, or on their way to."""

    HOME = "on the device"
    LEAVING = "on its way to the host"
    AWAY = "in host memory"
    RETURNING = "on its way to the device"


class Offload:
    """Tensors of one device that go to the host and come back, with a place there that is theirs for good."""

    def __init__(
        self, tensors: Sequence[Tensor], views: Sequence[Tensor] = (), what: str = "the optimizer's state"
    ) -> None:
        """Takes as many bytes of host memory as `tensors` have, pinned beside CUDA; of no tensors nothing ever leaves.

        tensors   each all of its storage, contiguous, and of one dtype and device with the others
        views     contiguous ones of them, which are as little there while they are away
        what      they are, for whom wants them then
        RuntimeError where the host cannot pin as much.
        """
        for tensor in tensors:
            assert tensor.is_contiguous() and tensor.untyped_storage().nbytes() == tensor.nbytes, tensor.shape
        self._tensors, self._views, self._what = list(tensors), list(views), what
        self._at_home = [tensor.detach() for tensor in tensors]
        self._views_at_home = [view.detach() for view in views]
        self.where = Where.HOME
        self._stream: torch.cuda.Stream | None = None
        self._copied: torch.cuda.Event | None = None
        if not tensors:
            return
        (dtype,), (device,) = {tensor.dtype for tensor in tensors}, {tensor.device for tensor in tensors}
        sizes = [tensor.numel() for tensor in tensors]
        # One piece: torch's pinned allocator would round every tensor up to a power of two.
        self._host = torch.empty(sum(sizes), dtype=dtype)
        if device.type == "cuda":
            pin_memory(self._host.data_ptr(), self._host.nbytes)
            # Before the memory is given back; as the process ends there may be no CUDA left to tell.
            weakref.finalize(self._host, unpin_memory, self._host.data_ptr()).atexit = False
            self._stream, self._copied = torch.cuda.Stream(device), torch.cuda.Event()
        self._on_host = [part.view(tensor.shape) for part, tensor in zip(self._host.split(sizes), tensors, strict=True)]
        self._of = {id(tensor): part for tensor, part in zip(self._tensors, self._on_host, strict=True)}
        of_storage = {home.data_ptr(): part for home, part in zip(self._at_home, self._on_host, strict=True)}
        for view in self._views:
            whole, first = of_storage[view.untyped_storage().data_ptr()].view(-1), view.storage_offset()
            self._of[id(view)] = whole[first : first + view.numel()].view(view.shape)

    def readable(self, tensor: Tensor) -> Tensor:
        """Where the numbers of a tensor can be read now: its copy on the host while it is away, else itself."""
        is_there = self.where in (Where.HOME, Where.LEAVING)
        return tensor if is_there else self._of.get(id(tensor), tensor)

    def start_leaving(self) -> None:
        """Begins the copies to the host, of what the device's work so far has made; nothing where they are away."""
        if self.where is Where.RETURNING:
            self.require_home()
        if self.where is Where.HOME and self._tensors:
            self._copy(self._on_host, self._at_home)
            self.where = Where.LEAVING

    def finish_leaving(self) -> None:
        """Waits for the copies and gives the device its memory back; nothing where none have begun.

        Afterwards the tensors and their views are empty, which whatever pairs them with a gradient, a weight or a place
        in a checkpoint refuses.
        """
        if self.where is not Where.LEAVING:
            return
        if self._copied is not None:
            self._copied.synchronize()
        for tensor in (*self._tensors, *self._views):
            tensor.data = self._at_home[0].new_empty(0)
        for home in self._at_home:
            home.untyped_storage().resize_(0)
        if self._stream is not None:
            torch.cuda.empty_cache()  # the engine's allocator does not ask torch's for what it keeps
        self.where = Where.AWAY

    def start_returning(self) -> None:
        """Takes the device's memory and begins the copies back; nothing where they are not away.

        Where there is less memory than they need, they stay away with all of it.
        """
        if self.where is not Where.AWAY:
            return
        try:
            for home in self._at_home:
                home.untyped_storage().resize_(home.nbytes)
        except BaseException:
            for home in self._at_home:
                home.untyped_storage().resize_(0)
            raise
        self._copy(self._at_home, self._on_host)
        self.where = Where.RETURNING

    def require_home(self) -> None:
        """What the device does from here on finds the tensors as they left.

        RuntimeError where nobody has called them back: waiting for them here would hide that nothing ran meanwhile.
        """
        if self.where is Where.RETURNING:
            if self._copied is not None:
                torch.cuda.current_stream().wait_event(self._copied)
            for tensor, home in zip(self._tensors, self._at_home, strict=True):
                tensor.data = home
            for view, home in zip(self._views, self._views_at_home, strict=True):
                view.data = home
            self.where = Where.HOME
        if self.where is not Where.HOME:
            raise RuntimeError(f"{self._what} is {self.where.value}: start_returning() comes before its use")

    def _copy(self, into: Sequence[Tensor], out_of: Sequence[Tensor]) -> None:
        if self._stream is None or self._copied is None:
            torch._foreach_copy_(into, out_of)
            return
        # After the work that made the numbers, or that last used the memory they come back to.
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            for to, tensor in zip(into, out_of, strict=True):
                to.copy_(tensor, non_blocking=True)
            self._copied.record()
