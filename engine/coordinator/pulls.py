"""The last pull of each worker's processes.

The server repeats a waiting pull internally, but a dead worker cannot receive the answer. The promise: a worker gets no
work in answer to a pull from before its death.
"""


class Pulls:
    """The last pull of each worker: the number of the process (`boot`) and of the pull (`seq`)."""

    def __init__(self) -> None:
        self._last: dict[str, tuple[int, int]] = {}
        self._dead: dict[str, tuple[int, int]] = {}
        """The last pulls of dead workers."""

    def add(self, worker: str, boot: int, seq: int) -> bool:
        """Record a pull. Return False if the worker died after this pull."""
        self._last[worker] = (boot, seq)
        return self._dead.get(worker) != (boot, seq)

    def died(self, worker: str, boot: int) -> bool:
        """Record the death of a process. Return False if a newer process of the worker has already called."""
        last = self._last.get(worker, (0, 0))
        if boot < last[0]:
            return False
        self._dead[worker] = last
        return True
