"""End a rank of the trainer whose group has lost a rank, even while the rank waits for a call that never ends.

A process that forms a group waits for connections of ranks that may be dead by then, for half an hour. A process that
trains notices a loss at its next collective, which may be minutes away. A thread of the process therefore looks for the
signs of a loss (rank_rendezvous.py), and ends the process. The agent then starts the rank again.
"""

import os
import threading
from collections.abc import Callable

from engine.node.child import EXIT_TORN

LOOK_SECONDS = 0.5
"""Interval of looks for a loss."""

leave: Callable[[int], object] = os._exit
"""Ends this process at once, like a lost rank: no other thread can hold it up."""


def leave_when(is_torn: Callable[[], bool], why: str) -> threading.Event:
    """End this process with EXIT_TORN once `is_torn`, until the returned event is set.

    is_torn  may raise RuntimeError (the store is gone), which is no loss: rank 0 ends, or has begun again
    why      sign of the loss, for the log
    """
    over = threading.Event()

    def look() -> None:
        while not over.wait(LOOK_SECONDS):
            try:
                torn = is_torn()
            except RuntimeError:
                return
            if torn:
                print(f"another rank of the trainer was lost: {why}", flush=True)
                leave(EXIT_TORN)
                return

    threading.Thread(target=look, name="rank-watch", daemon=True).start()
    return over
