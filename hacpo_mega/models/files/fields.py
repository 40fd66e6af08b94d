"""Typed reading of config.json, field by field."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hacpo_mega.models.files.documents import short

# Bounds that no decoder exceeds: a larger number is a slip, and later code may loop over it.
MOST = {
    "num_layers": 10_000,
    "hidden_size": 2**20,
    "num_heads": 2**16,
    "num_kv_heads": 2**16,
    "head_dim": 2**14,
    "ffn_size": 2**24,
    "num_experts": 2**16,
    "expert_ffn": 2**24,
    "shared_ffn": 2**24,
    "vocab_size": 2**24,
    "max_positions": 2**31,
}


@dataclass(frozen=True)
class Fields:
    """Typed reading of a JSON object; a ValueError names the file and the field. `null` counts as not given,
    of a flag as false.

    defaults   of numbers and flags that are not given; they come before the default of a call
    """

    path: Path
    given: Mapping[str, Any]
    defaults: Mapping[str, Any] = field(default_factory=dict)

    def count(self, name: str, *, default: int | None = None, least: int = 1, most: int | None = None) -> int:
        """An integer of at least `least`; no model has more than `most`."""
        value = self._value(name, default)
        if type(value) is not int or value < least:
            raise ValueError(f"{self.path}: {name} must be an integer of at least {least}, found {short(value)}")
        if most is not None and value > most:
            raise ValueError(f"{self.path}: {name} is more than {most:,}, which no model has; found {short(value)}")
        return value

    def positive(self, name: str, *, default: float | None = None) -> float:
        """A number above 0 that float32 holds."""
        value = self._value(name, default)
        if type(value) not in (int, float) or not 1e-30 <= value <= 1e30:
            raise ValueError(f"{self.path}: {name} must be a number above 0, found {short(value)}")
        return float(value)

    def at_least_one(self, name: str) -> float:
        """A number of at least 1 that float32 holds."""
        value = self.positive(name)
        if value < 1.0:
            raise ValueError(f"{self.path}: {name} must be at least 1, found {short(value)}")
        return value

    def flag(self, name: str, *, default: bool | None = None) -> bool:
        """True or false; null is false, as transformers and vLLM take it."""
        value = False if self.given.get(name, default) is None and name in self.given else self._value(name, default)
        if type(value) is not bool:
            raise ValueError(f"{self.path}: {name} must be true or false, found {short(value)}")
        return value

    def table(self, name: str) -> "Fields":
        """The object at `name`; an empty one where it is not given."""
        value = self.given.get(name)
        if not isinstance(value, dict | None):
            raise ValueError(f"{self.path}: {name} must be an object, found {short(value)}")
        return Fields(self.path, value or {})

    def _value(self, name: str, default: Any) -> Any:
        for value in (self.given.get(name), self.defaults.get(name), default):
            if value is not None:
                return value
        raise ValueError(f"{self.path}: the field {name!r} is missing")
