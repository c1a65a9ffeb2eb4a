"""A sink: what the process of a sink asks of W&B or MLflow."""

from typing import Protocol

from launcher.sinks.messages import ENDS, Open, Opened, Record


class NotAccepted(Exception):
    """The sink refused. `is_final`: another attempt would fail too. The text holds no key."""

    def __init__(self, text: str, *, is_final: bool = False) -> None:
        """Take the cause in words."""
        super().__init__(text)
        self.is_final = is_final


class Sink(Protocol):
    """One run in a sink. Every method may block for as long as the network does, and may raise any error."""

    def open(self, message: Open) -> Opened:
        """Begin the run, or continue it after a restart, under the same id."""

    def add(self, records: tuple[Record, ...], total: int) -> None:
        """Add records in the order of their numbers. Returning means that the sink has taken them."""

    def close(self, state: ENDS) -> None:
        """Finish the run, and wait until everything is stored."""
