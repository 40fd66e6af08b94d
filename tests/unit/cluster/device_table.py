"""A faked device table: what torch says of the GPUs of a machine that has none, or other ones."""

from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from hacpo_mega.cluster.machine import environment


@dataclass(frozen=True)
class DeviceTable:
    """`uuids` are the visible devices in their order; without any, `refusal` is what torch.cuda.init() raises.

    build       CUDA of torch's build, None for the CPU build
    has_node    whether the kernel shows a GPU, visible to torch or not
    """

    uuids: tuple[str, ...] = ()
    build: str | None = "13.0"
    refusal: str = ""
    has_node: bool = False

    def install(self, monkeypatch: pytest.MonkeyPatch, folder: Path) -> list[int]:
        """Puts the table in torch's place; returns the list of devices that torch is told to use, as it grows."""
        chosen: list[int] = []
        if self.has_node:
            (folder / "nvidia3").touch()  # as in a container that is given the fourth of a machine
        monkeypatch.setattr(environment, "DEVICES", folder)
        monkeypatch.setattr(torch.version, "cuda", self.build)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(self.uuids))
        monkeypatch.setattr(torch.cuda, "device_count", lambda: len(self.uuids))
        monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
        monkeypatch.setattr(torch.cuda, "init", self._init)
        monkeypatch.setattr(torch.cuda, "get_device_properties", self._properties)
        return chosen

    def _init(self) -> None:
        if not self.uuids:
            raise RuntimeError(self.refusal)

    def _properties(self, which: torch.device) -> SimpleNamespace:
        return SimpleNamespace(uuid=self.uuids[which.index])
