"""Record what a run left in its buckets, for commands that show its price without a call to the cloud.

The controller counts in the background while it removes the run's other resources, so a bucket that does not answer
delays neither the end of the run nor the release of a node.
"""

import threading
from collections.abc import Callable, Sequence

from sqlalchemy.orm import Session, sessionmaker

from launcher.clouds.limits import build_limits
from launcher.ledger.left_in_buckets import size_row
from launcher.ledger.models import Run
from launcher.ledger.store import writing
from launcher.storage.folder_sizes import COUNT_SECONDS, FolderSize, count_folders
from launcher.storage.stores import run_folders

CLOUDS = {"s3": "aws", "gs": "gcp"}

Count = Callable[[Sequence[str]], list[FolderSize]]


def region_of(url: str) -> str:
    """Return the region of a bucket; empty for a folder on this machine. Raises Failure."""
    cloud = CLOUDS.get(url.partition("://")[0])
    return "" if cloud is None else build_limits(cloud).bucket_region(url)


def count_now(urls: Sequence[str]) -> list[FolderSize]:
    return count_folders(urls, region_of)


class BucketSizes:
    """Counts the folders of one run once, in the background."""

    def __init__(self, sessions: sessionmaker[Session], run: Run, count: Count = count_now) -> None:
        self._sessions, self._run, self._count = sessions, run, count
        self._urls = [*run_folders(run.infra, run.job.get("store") or {}, run.name).values()]
        self._thread: threading.Thread | None = None

    def begin(self) -> None:
        """Begin to count. Call when no node of the run is left that could write. May be repeated."""
        if self._urls and self._thread is None:
            self._thread = threading.Thread(target=self._record, name="bucket sizes", daemon=True)
            self._thread.start()

    def end(self) -> None:
        """Wait for the count, which takes a bounded time."""
        if self._thread is not None:
            self._thread.join(2 * COUNT_SECONDS)

    def _record(self) -> None:
        sizes = self._count(self._urls)
        with writing(self._sessions) as session:
            session.add_all(size_row(self._run, size) for size in sizes)
