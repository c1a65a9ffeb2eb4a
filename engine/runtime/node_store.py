"""The node's store: where workers of one node meet to share a picture's sequence. It outlives every one of them.

    the agent starts it -> it writes down where it listens -> workers join it -> is it still the one that was joined?

A process of its own, a child of the node's agent in every runtime, because workers come and go and may be somebody
else's children (Ray's). It is found by `store.json` in the node's folder, which only the live one's words are in. No
torch before a store is served or joined: the agent asks here too.
"""

import time
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import TYPE_CHECKING

from engine.config import NodeSpec
from engine.runtime.child import Beat, begin, read_note, write_note

if TYPE_CHECKING:
    from engine.models.adapter import DiTAdapter
    from engine.parallel.elastic import Elastic

LOOK_SECONDS = 0.02
"""Between two looks for a store that is not there yet."""


def may_share(spec: NodeSpec) -> bool:
    """Whether workers of this node may share a picture, and so need a store."""
    return spec.role == "rollout" and spec.workers > 1 and spec.engine.runtime.sp_degree != 1


def forget_store(spec: NodeSpec) -> None:
    """Before a store starts, and before who would join it: what an earlier one said counts no more."""
    _store_file(spec).unlink(missing_ok=True)


def run_store(spec: NodeSpec, beat: Beat, ready: Event) -> None:
    """Serve until the agent ends this process."""
    # Before the first sign of life: where nothing has torch yet, this takes longer than a process may be silent.
    from engine.parallel.communicator import serve_store

    begin(spec, "store", beat)
    forget_store(spec)
    store = serve_store()
    # A port may come again, a start does not.
    write_note(_store_file(spec), port=store.port, started_ns=time.time_ns())
    ready.set()
    while True:
        time.sleep(3600)


def join_groups(spec: NodeSpec, adapter: "DiTAdapter") -> "Elastic | None":
    """A worker's part in the groups of its node, on its model; None when there are none. Waits for the store.

    They talk through gloo, on GPUs too. NCCL refuses two workers on one GPU, and nothing of ours ran it between two yet
    (tests/gpu/test_nccl.py).
    """
    if not may_share(spec):
        return None
    from engine.parallel.communicator import Communicators, join_store
    from engine.parallel.elastic import Elastic
    from engine.parallel.latency import believed_step_seconds
    from engine.parallel.ulysses import Ulysses, degrees_of

    file = _store_file(spec)
    while not (joined := read_note(file)):
        time.sleep(LOOK_SECONDS)
    timeout_seconds = spec.engine.runtime.sp_timeout_seconds
    store = join_store(joined["port"], timeout_seconds=timeout_seconds)
    communicators = Communicators(store, timeout_seconds=timeout_seconds)
    return Elastic(
        Ulysses(adapter.transformer),
        communicators,
        store,
        is_current=lambda: read_note(file) == joined,
        believed=believed_step_seconds(adapter.latent_shape(), degrees_of(adapter.transformer)),
    )


def _store_file(spec: NodeSpec) -> Path:
    return Path(spec.folder) / "store.json"
