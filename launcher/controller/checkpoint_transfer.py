"""Copy a run's checkpoint to the bucket of the trainer's cloud after a change of cloud."""

import logging
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from launcher.job.schema import Job
from launcher.ledger.models import Node, Run
from launcher.storage.stores import carry_over, open_store, run_store

log = logging.getLogger(__name__)

CARRY_SECONDS = 10.0
"""Time between two tries to copy a checkpoint to another cloud."""


def copy_checkpoint(source: str, target: str) -> object:
    """Copy the newest checkpoint from one bucket to another."""
    return carry_over(open_store(source), open_store(target))


class CheckpointTransfer:
    """Copies checkpoints in the background, and tries again after a failure.

    A trainer on another cloud starts only after the copy to its cloud is complete.
    """

    def __init__(self, run: Run, job: Job, copy: Callable[[str, str], object] = copy_checkpoint) -> None:
        self._run, self._job, self._copy = run, job, copy
        self._threads = ThreadPoolExecutor(max_workers=1, thread_name_prefix="carry")
        self._tried: dict[str, tuple[float, Future[object]]] = {}
        """By node: the start of the newest try (monotonic seconds), and the try."""
        self.failure: str | None = None
        """The failure of the newest copy, as text. None: no copy has failed."""

    def is_complete(self, node: Node, before: str | None) -> bool:
        """Return whether the checkpoint is in the bucket of this trainer's cloud, and start a copy otherwise.

        `before`: cloud of the last trainer that came up, or None.
        """
        if before is None or before == node.cloud:
            return True
        tried = self._tried.get(node.name)
        if tried is not None and tried[1].done():
            error = tried[1].exception()
            if error is None:
                self.failure = None
                return True
            if time.monotonic() - tried[0] < CARRY_SECONDS:
                return False
            self.failure = f"the checkpoint cannot be carried from {before} to {node.cloud}: {error}"
            log.warning("%s", self.failure)
        if tried is None or tried[1].done():
            urls = [run_store(self._job.store, cloud, self._run.name) for cloud in (before, node.cloud)]
            self._tried[node.name] = (time.monotonic(), self._threads.submit(self._copy, *urls))
        return False

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
