"""The reasons not to trust this machine's clock. Nothing is bought while a doubt lasts."""

from dataclasses import dataclass

MOST_OFF_MS = 60_000
"""Largest accepted difference of clocks in ms. A cloud reports whole seconds, and the answer takes seconds."""


@dataclass(frozen=True, slots=True)
class Doubt:
    """The reason to doubt the time.

    `is_ahead`: the run's clock is fast, so money and deadline seem used up too early.
    """

    text: str
    is_ahead: bool = False
