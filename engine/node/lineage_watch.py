"""End a trainer's process when another node has claimed a newer lineage of the run.

The launcher gives up a node that is frozen or cut off. Such a node may wake, and go on beside its successor. Its work
does not count, and the node costs money.
"""

import os
import threading
import time

from engine.node.child import EXIT_SUPERSEDED
from engine.storage.checkpoint import CheckpointStore, Superseded

LOOK_SECONDS = 10.0
"""Wall seconds between two looks into the store."""


def begin_watching(store: CheckpointStore, lineage: int) -> None:
    """Look every ten seconds from now on. An error ends neither the process nor the looks: the next batch meets it."""

    def watch() -> None:
        while True:
            time.sleep(LOOK_SECONDS)
            try:
                store.check_lineage(lineage)
            except Superseded as superseded:
                print(superseded, flush=True)
                os._exit(EXIT_SUPERSEDED)
            except Exception as error:  # obstore has an error type for each refusal of a store
                print(f"the lineages of the run could not be read: {error}", flush=True)

    threading.Thread(target=watch, daemon=True, name="lineage").start()
