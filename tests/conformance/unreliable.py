"""A transport on which messages are late, doubled or repeated much later, and answers get lost."""

import random
import threading
import time
from collections.abc import Mapping
from typing import Any

from engine.protocol.codec import Blobs
from engine.worker.transport import Answer, Transport

LONGEST_DELAY_SECONDS = 0.1


class Unreliable:
    """A `Transport` over another one; its faults depend on its seed and the order of calls."""

    def __init__(self, inner: Transport, seed: int) -> None:
        self._inner = inner
        self._random = random.Random(seed)
        self._lock = threading.Lock()
        self._old: list[tuple[Mapping[str, Any], Blobs | None]] = []
        self.faults = 0

    def call(self, head: Mapping[str, Any], blobs: Blobs | None = None, *, wait: bool = False) -> Answer:
        with self._lock:
            fault = self._random.choice(["none", "none", "late", "twice", "lost answer", "ghost"])
            delay = self._random.uniform(0.0, LONGEST_DELAY_SECONDS)
            ghost = self._random.choice(self._old) if fault == "ghost" and self._old else None
            self._old.append((head, blobs))
            self.faults += fault != "none"
        if ghost is not None:  # a duplicate of an old message arrives now
            self._inner.call(*ghost)
        if fault == "late":
            time.sleep(delay)
        answer = self._inner.call(head, blobs, wait=wait)
        if fault == "twice":
            self._inner.call(head, blobs)
        if fault == "lost answer":
            time.sleep(delay)
            return self._inner.call(head, blobs, wait=wait)
        return answer
