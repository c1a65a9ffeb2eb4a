"""Failures of leases: the worker reports each failure, and its process ends after many failures in a row."""

from engine.out_of_memory import free_memory
from engine.protocol.request import Work
from engine.worker.coordinator_calls import CoordinatorCalls

MOST_FAULTS = 10
"""Failures in a row after which the process ends. The node's agent then starts a new process."""


class LeaseFaults:
    """Failures of one worker."""

    def __init__(self, calls: CoordinatorCalls) -> None:
        self._calls = calls
        self._in_a_row = 0
        self.most_images: int | None = None
        """Largest number of images in one forward pass; None until a shape did not fit into memory."""

    def report(self, work: Work, error: BaseException) -> None:
        """Report a failed lease. Raises the error after `MOST_FAULTS` failures in a row."""
        self._in_a_row += 1
        self._calls.fault(work.lease, f"{type(error).__name__}: {error}"[:500])
        if self._in_a_row >= MOST_FAULTS:
            raise error

    def report_follower(self, work: Work, error: BaseException) -> None:
        """Record a failed lease that this worker shares with its SP group. Raises like `report`.

        The group's first worker holds the lease and reports the failure.
        """
        self._in_a_row += 1
        print(f"could not follow lease {work.lease}: {type(error).__name__}: {error}", flush=True)
        if self._in_a_row >= MOST_FAULTS:
            raise error

    def reduce_shape(self, work: Work, text: str) -> None:
        """Record that the shape does not fit, and give the lease back without a fault.

        The next pull reports the smaller limit.
        """
        self.most_images = min(work.shape - 1, work.shape if self.most_images is None else self.most_images)
        free_memory()
        print(f"{work.shape} images do not fit into memory, at most {self.most_images} from now on: {text}", flush=True)
        self._calls.give_back(work.lease)

    def clear(self) -> None:
        """Record a success."""
        self._in_a_row = 0
