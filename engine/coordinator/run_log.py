"""The run's state together with its journal: each change is recorded first and applied second."""

import contextlib

from engine.coordinator.journal import Journal
from engine.coordinator.run_state import RunState
from engine.coordinator.weight_book import WeightBook
from engine.protocol.codec import Blobs, encode_record
from engine.protocol.records import Record


class RunLog:
    """Records and applies changes. All methods raise OSError if the disk is full, unless they say otherwise."""

    def __init__(self, journal: Journal, book: WeightBook, state: RunState) -> None:
        self.journal, self._book, self.state = journal, book, state

    def record(self, record: Record, blobs: Blobs | None = None) -> None:
        """Write a record to the journal. The record is durable after the journal's next `sync`."""
        self.journal.append(encode_record(record), blobs)

    def record_and_apply(self, record: Record, now_ms: int) -> None:
        """Write a record, change the state, and drop the weights that no request needs any more."""
        self.record(record)
        for weights in self.state.apply(record, now_ms):
            self._book.drop(weights)

    def record_lease(self, number: int) -> None:
        """Record the lease without waiting for the disk.

        After a crash, a forgotten lease is revoked: its steps are repeated, and no result is lost.
        """
        with contextlib.suppress(OSError):  # the disk is full: the next call with a durable record raises
            self.journal.append(encode_record(self.state.queue.lease_record(number)), durable=False)

    def record_poison(self, now_ms: int) -> None:
        """Record the requests that were poisoned since the last call."""
        for record in self.state.new_poison():
            self.record_and_apply(record, now_ms)

    def compact(self) -> None:
        """Rewrite the journal with the current state. Blobs of trained batches are dropped.

        On a full disk, the obsolete records stay in the journal until the next compaction.
        """
        records = [
            (encode_record(record), {name: self.journal.blob(name) for name in names})
            for record, names in self.state.records()
        ]
        with contextlib.suppress(OSError):
            self.journal.rewrite(records)
