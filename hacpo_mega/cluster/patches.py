"""Names of other libraries that this process replaces for good: one record each, applied at one place a library.

Every library has its table: torch's is here, Megatron's in megatron/patches.py, vLLM's in rollout/patches.py.
tests/unit/cluster/test_patches.py holds owner, name and signature of each to the pinned version, so that a new version
that changes one fails there. Not here: names that are replaced while a block runs (megatron/model/platform.py,
rollout/vllm/host_process.py).
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch.distributed import distributed_c10d

from hacpo_mega.cluster.groups.lone_groups import Gloo
from hacpo_mega.cluster.security.peer_objects import PlainUnpickler


@dataclass(frozen=True)
class Patch:
    """One name of a library and its replacement.

    owner   the library's module or class
    name    attribute of the owner; absent is fine
    ours    what takes its place; with `wraps` a function that makes it from the library's own
    why     the reason
    """

    owner: Any
    name: str
    ours: Any
    why: str
    wraps: bool = False

    def original(self) -> Any:
        """The library's own attribute of that name, also after the patch; None where it has none."""
        return _ORIGINALS.get((self.owner, self.name), getattr(self.owner, self.name, None))


_ORIGINALS: dict[tuple[Any, str], Any] = {}

TORCH = (
    Patch(distributed_c10d, "_unpickler", PlainUnpickler, "a peer's object is plain values and tensors, never code"),
    Patch(distributed_c10d, "ProcessGroupGloo", Gloo, "groups of one rank are one group: each has threads and sockets"),
)


def apply_patches(patches: Iterable[Patch]) -> None:
    """Replaces each name, once in a process."""
    for patch in patches:
        if (patch.owner, patch.name) not in _ORIGINALS:
            original = _ORIGINALS[patch.owner, patch.name] = patch.original()
            setattr(patch.owner, patch.name, patch.ours(original) if patch.wraps else patch.ours)
