"""End a trainer's process when another node has claimed a newer lineage of the run.

A node that was frozen or cut off, and was given up for that, may go on beside its successor. Nothing of what it does
counts, and it costs money.
"""

import os
import threading
import time

from engine.node.child import EXIT_SUPERSEDED
from engine.storage.checkpoint import CheckpointStore, Superseded

LOOK_SECONDS = 10.0
"""Wall seconds between two looks into the store."""


def begin_watching(store: CheckpointStore, lineage: int) -> None:
    """Look every ten seconds from now on. A store that does not answer says nothing."""

    def watch() -> None:
        while True:
            time.sleep(LOOK_SECONDS)
            try:
                store.check_lineage(lineage)
            except Superseded as superseded:
                print(superseded, flush=True)
                os._exit(EXIT_SUPERSEDED)
            except OSError:
                continue

    threading.Thread(target=watch, daemon=True, name="lineage").start()
