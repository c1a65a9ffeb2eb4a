"""Numbers of epochs and communicators, and the communicators that live processes share.

An epoch is the number of an SP group, and a communicator is the process group with which its workers compute
(engine/parallel/communicator.py).

The promise: a number is issued once, for a fixed set of processes. A restarted worker process, or a worker with a
broken communicator, gets new numbers only.
"""

from collections.abc import Sequence

Process = tuple[str, int]
"""A worker and the number of its process (`boot`)."""


class Communicators:
    """The communicators not known to be broken, by their processes in rank order."""

    def __init__(self, *, first: int) -> None:
        """Issue numbers from `first`, above every number issued by an earlier coordinator."""
        self._next = first
        self._known: dict[tuple[Process, ...], int] = {}

    @property
    def next_number(self) -> int:
        """The number that is issued next."""
        return self._next

    def numbers(self) -> dict[tuple[Process, ...], int]:
        """Return the known communicators: their processes in rank order, and their number."""
        return dict(self._known)

    def issue_number(self) -> int:
        """Return a number that was never issued before."""
        self._next += 1
        return self._next - 1

    def shared_by(self, processes: Sequence[Process]) -> int:
        """Return the number of the communicator of these processes. Issue a new number if they share none."""
        key = tuple(processes)
        if key not in self._known:
            self._known[key] = self.issue_number()
        return self._known[key]

    def of_process(self, process: Process) -> tuple[int, ...]:
        """Return the numbers of the process's communicators, ascending."""
        return tuple(sorted(number for members, number in self._known.items() if process in members))

    def retire(self, number: int) -> None:
        """Remove a broken communicator."""
        for processes in [members for members, some in self._known.items() if some == number]:
            del self._known[processes]

    def forget(self, process: Process) -> None:
        """Remove the communicators of a dead process."""
        for processes in [members for members in self._known if process in members]:
            del self._known[processes]
