"""Offload of an actor's tensors to host memory while the engine generates. Bitwise neutral.

`agents.offload` offloads what an optimizer step alone reads: the float32 main weights that are copies of
half-precision ones, and both moments of Adam. Main weights that are views of the model's own, as with a float32 model,
stay. `placement = "shared"` offloads the whole actor (optimizer.py). Gradient buffers are scratch, since every backward
begins by filling them with zeros: their memory is freed and taken again without a copy.

    begin_offload      begins copies to the host; the state may still be read, not written
    finish_offload     waits for them and frees the device memory, scratch included
    begin_onload       takes the device memory and begins copies to it; scratch is usable
    ensure_on_device   makes the device's later work wait for them; the state is usable

On CUDA the copies run on a stream of their own through pinned memory, beside other work: out beside publishing, back
beside judging, exchanging and scoring (agent/devices.py). On the CPU they are done at once, and the memory is freed and
taken again all the same.

Why not Megatron's own (core 0.19.2): `MegatronOptimizer.offload_to_cpu` and `restore_from_cpu` wait for every copy, use
pageable memory that they allocate anew each time, ignore tensors on the CPU, and give every tensor another storage: a
view of a float32 model's weights comes back as a second copy of them, and other views read stale data.
`optimizer_cpu_offload` (HybridDeviceOptimizer) moves the optimizer step itself to the CPU. Here every tensor keeps its
storage object, whose memory is freed and taken again, so all its views stay valid.

Elsewhere: times of offload (agent/devices.py), numbers of bytes (memory/actor_bytes.py).
"""

import enum
import weakref
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.cuda._pin_memory_utils import pin_memory, unpin_memory


class Residence(enum.Enum):
    """Location of the tensors."""

    ON_DEVICE = "on the device"
    OFFLOADING = "on its way to the host"
    ON_HOST = "in host memory"
    ONLOADING = "on its way to the device"


class Offload:
    """Tensors of one device that move to the host and back, with a permanent place in host memory."""

    def __init__(
        self,
        tensors: Sequence[Tensor],
        views: Sequence[Tensor] = (),
        name: str = "the optimizer's state",
        *,
        scratch: Sequence[Tensor] = (),
    ) -> None:
        """Allocates host memory for `tensors`, pinned beside CUDA; without tensors and scratch nothing ever moves.

        tensors   each spans its whole storage, is contiguous, and shares one dtype and device with the others
        views     contiguous views of them, which are emptied along with them
        name      of the tensors, for error messages
        scratch   tensors over whole storages whose numbers nobody needs later: they come back with arbitrary content

        RuntimeError if the host cannot pin as much.
        """
        for tensor in (*tensors, *scratch):
            assert tensor.is_contiguous() and tensor.untyped_storage().nbytes() == tensor.nbytes, tensor.shape
        self._tensors, self._views, self._name = list(tensors), list(views), name
        # While offloaded, a tensor has other `data`; these keep its storage, whose memory is freed and taken again.
        self._originals = [tensor.detach() for tensor in tensors]
        self._view_originals = [view.detach() for view in views]
        self._scratch, self._scratch_originals = list(scratch), [tensor.detach() for tensor in scratch]
        self.residence = Residence.ON_DEVICE
        self._stream: torch.cuda.Stream | None = None
        self._copied: torch.cuda.Event | None = None
        self._host_copy: dict[int, Tensor] = {}
        if not tensors:
            return
        (dtype,), (device,) = {tensor.dtype for tensor in tensors}, {tensor.device for tensor in tensors}
        sizes = [tensor.numel() for tensor in tensors]
        # One piece: torch's pinned allocator would round every tensor up to a power of two.
        self._host = torch.empty(sum(sizes), dtype=dtype)
        if device.type == "cuda":
            pin_memory(self._host.data_ptr(), self._host.nbytes)
            # Before the memory is freed; at process exit CUDA may be gone already.
            weakref.finalize(self._host, unpin_memory, self._host.data_ptr()).atexit = False
            self._stream, self._copied = torch.cuda.Stream(device), torch.cuda.Event()
        self._on_host = [part.view(tensor.shape) for part, tensor in zip(self._host.split(sizes), tensors, strict=True)]
        self._host_copy |= {id(tensor): part for tensor, part in zip(self._tensors, self._on_host, strict=True)}
        of_storage = {original.data_ptr(): part for original, part in zip(self._originals, self._on_host, strict=True)}
        for view in self._views:
            whole, first = of_storage[view.untyped_storage().data_ptr()].view(-1), view.storage_offset()
            self._host_copy[id(view)] = whole[first : first + view.numel()].view(view.shape)

    def readable(self, tensor: Tensor) -> Tensor:
        """Tensor with the current numbers of `tensor`: its host copy while it is offloaded, else itself."""
        is_on_device = self.residence in (Residence.ON_DEVICE, Residence.OFFLOADING)
        return tensor if is_on_device else self._host_copy.get(id(tensor), tensor)

    def begin_offload(self) -> None:
        """Begins to copy the tensors to the host, behind the device's work so far; a no-op unless on the device."""
        if self.residence is Residence.ONLOADING:
            self.ensure_on_device()
        if self.residence is Residence.ON_DEVICE and (self._tensors or self._scratch):
            if self._tensors:
                self._copy(self._on_host, self._originals)
            self.residence = Residence.OFFLOADING

    def finish_offload(self) -> None:
        """Waits for the copies and frees the device memory; a no-op if none have begun.

        Afterwards the tensors and their views are empty, so that pairing them with a gradient, a weight or a place in a
        checkpoint fails.
        """
        if self.residence is not Residence.OFFLOADING:
            return
        if self._copied is not None:
            self._copied.synchronize()
        for tensor in (*self._tensors, *self._views, *self._scratch):
            tensor.data = tensor.new_empty(0)
        whole = [*self._originals, *self._scratch_originals]
        for original in whole:
            original.untyped_storage().resize_(0)
        if whole[0].is_cuda:
            torch.cuda.empty_cache()  # the engine's allocator cannot use memory that torch's caches
        self.residence = Residence.ON_HOST

    def begin_onload(self) -> None:
        """Takes device memory and begins the copies back; a no-op unless offloaded.

        If the device lacks the memory, the tensors stay offloaded.
        """
        if self.residence is not Residence.ON_HOST:
            return
        whole = [*self._scratch_originals, *self._originals]
        try:
            for original in whole:
                original.untyped_storage().resize_(original.nbytes)
        except BaseException:
            for original in whole:
                original.untyped_storage().resize_(0)
            raise
        for tensor, original in zip(self._scratch, self._scratch_originals, strict=True):
            tensor.data = original
        if self._tensors:
            self._copy(self._originals, self._on_host)
        self.residence = Residence.ONLOADING

    def ensure_on_device(self) -> None:
        """Makes the device's later work find the tensors in place.

        RuntimeError if no onload has begun: waiting for it here would hide that nothing ran meanwhile.
        """
        if self.residence is Residence.ONLOADING:
            if self._copied is not None:
                torch.cuda.current_stream().wait_event(self._copied)
            for tensor, original in zip(self._tensors, self._originals, strict=True):
                tensor.data = original
            for view, original in zip(self._views, self._view_originals, strict=True):
                view.data = original
            self.residence = Residence.ON_DEVICE
        if self.residence is not Residence.ON_DEVICE:
            raise RuntimeError(f"{self._name} is {self.residence.value}: begin_onload() comes before its use")

    def _copy(self, into: Sequence[Tensor], out_of: Sequence[Tensor]) -> None:
        if self._stream is None or self._copied is None:
            torch._foreach_copy_(into, out_of)
            return
        # Behind the work that made the numbers, or that last used the memory that they come back to.
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            for to, tensor in zip(into, out_of, strict=True):
                to.copy_(tensor, non_blocking=True)
            self._copied.record()
