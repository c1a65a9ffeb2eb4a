"""A place for weights that arrive in pieces, and the function that brings them. No torch and no network here."""

from collections.abc import Callable
from typing import Protocol

from engine.protocol.request import WeightsKey


class Sink(Protocol):
    """A place for arriving weights. `have`: bytes that are there already. `size`: of all bytes; 0: not known yet."""

    have: int
    size: int

    def begin(self, size: int) -> None:
        """Make room for so many bytes in all. Weights of another size than before begin anew at `have` = 0."""

    def take(self, piece: memoryview) -> None:
        """Keep the next bytes."""


Fetch = Callable[[WeightsKey, str, Sink], bool]
"""Fetch the bytes with this digest into a sink, from byte `have` on. Returns False if other weights were published
under this key in the meantime. Raises the errors of its transport; a later fetch goes on from there."""
