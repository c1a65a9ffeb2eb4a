"""Recovery of a run's state from the journal.

The promise: every start of a coordinator issues lease numbers above all earlier numbers, and the start is durable
before the first lease.
"""

from engine.coordinator.journal import Journal
from engine.coordinator.run_state import RunState
from engine.coordinator.weight_book import WeightBook
from engine.protocol.codec import Head, decode_record, encode_record
from engine.protocol.records import CoordinatorStarted, Record
from engine.queue.pace import Rules

LEASES_PER_MS = 10_000
LEASES_PER_START = 1_000_000
"""Gap between the first lease numbers of two starts. Every start of a coordinator issues numbers above all earlier
ones. The time of day ensures uniqueness on a new machine with an empty journal. The journal's newest number ensures
uniqueness after a clock was set back."""


def recover(journal: Journal, book: WeightBook, rules: Rules, now_ms: int) -> RunState:
    """Return the state that the journal describes, ready to issue leases. Raises ValueError for an unknown record."""
    state = RunState(rules)
    for head in journal.replay():
        for weights in state.apply(read_record(head), now_ms):
            book.drop(weights)
    state.queue.tick(now_ms)  # from here on, the queue notices pauses of its own process
    start = CoordinatorStarted(first_lease=max(state.highest_lease + LEASES_PER_START, now_ms * LEASES_PER_MS))
    state.queue.begin_leases(start.first_lease)
    journal.append(encode_record(start))
    state.apply(start, now_ms)
    journal.sync()
    return state


def read_record(head: Head) -> Record:
    """Return the record in a head of the journal. Raises ValueError for a record of another version."""
    try:
        return decode_record(head)
    except ValueError as error:
        raise ValueError(
            f"the journal holds a record {head.get('op')!r} that this version cannot read: {error}. Start the version "
            "that wrote the journal, or move the folder `coordinator` away: the run then goes on from its newest "
            "checkpoint"
        ) from error
