"""Count the bytes in folders of buckets, within a bounded time and without an error.

A folder may hold many objects, and a bucket may not answer. The count then is a lower bound, or unknown, and says why.
"""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import obstore

from launcher.exit_codes import Failure
from launcher.storage.stores import bucket_errors, open_store

COUNT_SECONDS = 10.0
"""Longest time of a count (wall time). A bucket lists several thousand objects a second (assumed)."""

PAGE_OBJECTS = 1000
"""Objects in one answer of S3 and Google Cloud Storage."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FolderSize:
    """The bytes in one folder of a bucket."""

    url: str
    bytes: int | None
    """None: unknown; `problem` says why."""
    is_whole: bool
    """False: the folder holds at least `bytes`; `problem` says why its listing ended early."""
    region: str
    """Region of the bucket; empty: unknown."""
    problem: str


def sizes_in(url: str) -> Iterator[list[int]]:
    """Yield the sizes of a folder's objects, page by page. Raises StoreError."""
    with bucket_errors(url):
        for page in obstore.list(open_store(url), chunk_size=PAGE_OBJECTS):
            yield [entry["size"] for entry in page]


def count_folders(
    urls: Sequence[str],
    region_of: Callable[[str], str],
    seconds: float = COUNT_SECONDS,
    pages_of: Callable[[str], Iterator[list[int]]] = sizes_in,
) -> list[FolderSize]:
    """Return the size of each folder, all counted at the same time. Blocks for `seconds` at most.

    `region_of`: returns the region of a folder's bucket. A Failure of it means an unknown region.
    """
    listings = [_Listing(url, region_of, pages_of) for url in urls]
    until = time.monotonic() + seconds
    for listing in listings:
        listing.start()
    for listing in listings:
        listing.join(max(0.0, until - time.monotonic()))
    return [listing.end(seconds) for listing in listings]


class _Listing(threading.Thread):
    """Lists one folder in the background, because a call to a bucket cannot be ended."""

    def __init__(
        self, url: str, region_of: Callable[[str], str], pages_of: Callable[[str], Iterator[list[int]]]
    ) -> None:
        super().__init__(name=f"size of {url}", daemon=True)
        self._url, self._region_of, self._pages_of = url, region_of, pages_of
        self._bytes: int | None = None
        self._is_whole, self._is_ended = False, False
        self._region, self._problem = "", ""

    def run(self) -> None:
        try:
            for sizes in self._pages_of(self._url):
                if self._is_ended:
                    return
                self._bytes = (self._bytes or 0) + sum(sizes)
            self._bytes, self._is_whole = self._bytes or 0, True
            self._region = self._region_of(self._url)
        except (Failure, OSError) as error:
            if not self._is_whole:
                self._problem = next(iter(str(error).splitlines()), type(error).__name__)

    def end(self, seconds: float) -> FolderSize:
        """Return the size as far as it is known, and list no further page."""
        self._is_ended = True
        is_whole = self._is_whole
        problem = "" if is_whole else self._problem or f"the bucket was not listed to its end within {seconds:g} s"
        return FolderSize(url=self._url, bytes=self._bytes, is_whole=is_whole, region=self._region, problem=problem)
