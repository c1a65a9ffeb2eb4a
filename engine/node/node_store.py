"""Run the node's store: the rendezvous of the node's workers for sharing an image's sequence.

    agent starts the store -> the store writes its port down -> workers join -> workers check for a newer store

The store outlives every worker. The store is a process of its own, a child of the node's agent in every runtime,
because workers come and go and may be children of another process (Ray's). Workers find the store by `store.json` in
the node's folder; only the live store's entry is in the file. No torch is imported before a store is served or joined,
because the agent calls functions of this module too.
"""

import time
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import TYPE_CHECKING

from engine.node.child import SharedHeartbeat, begin, read_note, write_note
from engine.node_spec import NodeSpec

if TYPE_CHECKING:
    from engine.models.adapter import DiTAdapter
    from engine.parallel.elastic import Elastic

LOOK_SECONDS = 0.02
"""Interval of looks for a store that has not started yet."""


def may_share(spec: NodeSpec) -> bool:
    """Return True if workers of this node may share an image, and therefore need a store."""
    return spec.role == "rollout" and spec.workers > 1 and spec.engine.runtime.sp_degree != 1


def forget_store(spec: NodeSpec) -> None:
    """Remove an earlier store's entry. Call before a store starts, and before workers join."""
    _store_file(spec).unlink(missing_ok=True)


def run_store(spec: NodeSpec, heartbeat: SharedHeartbeat, ready: Event) -> None:
    """Serve until the agent ends this process."""
    # Import before the first sign of life: without torch preloaded, the import takes longer than a process may be
    # silent.
    from engine.parallel.communicator import serve_store

    begin(spec, "store", heartbeat)
    forget_store(spec)
    store = serve_store()
    # A port may be reused by a later store, a start time is not.
    write_note(_store_file(spec), port=store.port, started_ns=time.time_ns())
    ready.set()
    while True:
        time.sleep(3600)


def join_groups(spec: NodeSpec, adapter: "DiTAdapter") -> "Elastic | None":
    """Return a worker's member of the node's SP groups for its model, or None without groups. Waits for the store.

    The groups communicate through NCCL if each worker has a GPU of its own, else through gloo. No test has run NCCL
    between two GPUs yet (tests/gpu/test_nccl.py).
    """
    if not may_share(spec):
        return None
    from engine.models.guidance_pair import DEGREES, GuidancePair
    from engine.parallel.communicator import Communicators, join_store, links_of
    from engine.parallel.elastic import Elastic
    from engine.parallel.latency import believed_step_seconds
    from engine.parallel.ulysses import SPBackend, Ulysses, degrees_of

    file = _store_file(spec)
    while not (joined := read_note(file)):
        time.sleep(LOOK_SECONDS)
    timeout_seconds = spec.engine.runtime.sp_timeout_seconds
    store = join_store(joined["port"], timeout_seconds=timeout_seconds)
    device = next(adapter.transformer.parameters()).device
    communicators = Communicators(store, timeout_seconds=timeout_seconds, links=links_of(device))
    backend: SPBackend
    if spec.engine.runtime.cfg_parallel:
        backend = GuidancePair(adapter)
        believed = {degree: 1.0 / degree for degree in DEGREES}
    else:
        backend = Ulysses(adapter.transformer)
        believed = believed_step_seconds(adapter.latent_shape(), degrees_of(adapter.transformer))
    return Elastic(backend, communicators, store, is_current=lambda: read_note(file) == joined, believed=believed)


def _store_file(spec: NodeSpec) -> Path:
    return Path(spec.folder) / "store.json"
