"""A store that counts, to hold the formulas of hacpo_lab/planning/store_cost.py against a real job."""

from collections import Counter
from typing import Any

import torch.distributed as dist


class CountingStore(dist.Store):
    """A store that counts what this process asks of another one, by operation, and the bytes that it sets and gets."""

    def __init__(self, store: dist.Store) -> None:
        super().__init__()
        self._store = store
        self.counts: Counter[str] = Counter()

    def set(self, key: str, value: Any) -> None:
        self.counts["set"] += 1
        self.counts["set bytes"] += len(value)
        self._store.set(key, value)

    def get(self, key: str) -> bytes:
        value = self._store.get(key)
        self.counts["get"] += 1
        self.counts["get bytes"] += len(value)
        return value

    def multi_get(self, keys: list[str]) -> list[bytes]:
        values = self._store.multi_get(keys)
        self.counts["get"] += len(values)
        self.counts["get bytes"] += sum(map(len, values))
        return values

    def add(self, key: str, amount: int) -> int:
        self.counts["add" if amount else "poll"] += 1
        return self._store.add(key, amount)

    def wait(self, keys: list[str], *timeout: Any) -> None:
        self._store.wait(keys, *timeout)

    def check(self, keys: list[str]) -> bool:
        return self._store.check(keys)

    def has_extended_api(self) -> bool:
        return False
