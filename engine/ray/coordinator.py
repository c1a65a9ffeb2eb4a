"""Run the coordinator as a Ray actor on the on-demand node, with a transport and a source of weights for its callers.

The actor hosts the same `Front` as the HTTP server. The actor hosts the HTTP server too, because the launcher and the
node agents speak HTTP. Published weights lie in the object store. The actor owns the weights, so a preemption never
removes the data. Each node fetches a version once, and the node's workers map the copy.
"""

import asyncio
import contextlib
import errno
import fcntl
import mmap
import os
import threading
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import ray
import stamina
from ray.exceptions import RayError, RayTaskError

from engine.coordinator.open import fund_of, open_coordinator
from engine.coordinator.rights import NotAllowed, Rights, WrongToken
from engine.coordinator.server import CoordinatorServer, Front, bind
from engine.node.child import note_start, open_log
from engine.node_spec import NodeSpec
from engine.protocol.codec import Blobs, Head, decode_call, encode
from engine.protocol.messages import Call, Publish, Published
from engine.protocol.request import WeightsKey
from engine.ray.cluster import NAMESPACE, die_with_raylet
from engine.storage.disk import when_there_is_room
from engine.storage.progress import ProgressLog
from engine.storage.tensor_files import Stored
from engine.timing.work import START_SECONDS
from engine.worker.transport import WAIT_MS, Answer, CallRefused, CoordinatorLost

NAME = "coordinator"

ANSWER_SECONDS = 10.0
"""Seconds without an answer after which a call is repeated."""

ARRIVAL_SECONDS = 600.0
"""Seconds in which weights must arrive. The end of their owner ends the wait at once."""

VERSIONS_KEPT = 2
"""Number of versions kept, of the live weights and of the averaged evaluation weights."""

LOCK_SECONDS = 20.0
"""Seconds a coordinator waits for its folder's lock, because the previous coordinator may still be ending."""


class CoordinatorActor:
    """Ray actor of the coordinator, one per run. Ray restarts a dead actor, and the journal restores the state."""

    def __init__(self, spec_json: str, address: str) -> None:
        spec = NodeSpec.model_validate_json(spec_json)
        self._rights = Rights(spec.token)
        die_with_raylet()
        open_log(spec, "coordinator")
        whoami = {"pid": os.getpid(), "create_time": psutil.Process().create_time()}
        note_start(pid_file(spec), spec, **whoami)
        try:
            self._open(spec, address)
        except Exception:
            # Exit: Ray would declare an actor dead after a failed constructor, and never retry.
            traceback.print_exc()
            os._exit(1)

    def _open(self, spec: NodeSpec, address: str) -> None:
        folder = Path(spec.folder)
        spec.clock.meter().done(START_SECONDS)
        self._lock = _only_one(folder / "coordinator.lock")
        listener = bind(spec.coordinator_host, spec.coordinator_port)
        progress = ProgressLog(
            folder / "progress" / "coordinator.jsonl", run=spec.run, source="coordinator", clock=spec.clock.run_clock()
        )
        coordinator = open_coordinator(
            folder / "coordinator",
            clock=spec.clock.clock(),
            run_clock=spec.clock.run_clock(),
            runtime=spec.engine.runtime,
            progress=progress,
            fund=fund_of(spec.engine.reward, spec.store, spec.judges_micro_usd),
        )
        self._shelf = _Shelf()
        self._loop = asyncio.new_event_loop()
        up = threading.Event()

        async def serve() -> None:
            self._front = Front(coordinator)
            up.set()
            server = CoordinatorServer(self._front, self._rights, shipped=folder / "shipped", ray_address=address)
            await server.serve(listener)

        # Use a separate thread, so Ray's event loop only carries calls.
        threading.Thread(target=self._loop.run_until_complete, args=(serve(),), daemon=True).start()
        up.wait()

    async def ping(self) -> bool:
        """Return True if the state machine's own thread is alive too."""
        return bool(await self._in_loop(asyncio.sleep(0, result=True)))

    async def call(self, token: str, head: Head, arrays: dict[str, np.ndarray]) -> tuple[str, Any, Any]:
        """Answer ("ok", answer, blobs), ("full", text, None) or ("refused", text, None)."""
        try:
            self._rights.check_call(token, head)
        except (WrongToken, NotAllowed) as error:
            return "refused", str(error), None
        try:
            call = decode_call(head)
        except ValueError as error:
            return "refused", f"{type(error).__name__}: {error}", None
        return await self._answer(call, arrays)

    async def _answer(self, call: Call, arrays: dict[str, np.ndarray]) -> tuple[str, Any, Any]:
        # Copy, because an array from the object store would otherwise stay pinned in the store.
        blobs = {name: array.tobytes() for name, array in arrays.items()}
        try:
            answer, answer_blobs = await self._in_loop(self._front.answer(call, blobs))
        except (ValueError, KeyError) as error:
            return "refused", f"{type(error).__name__}: {error}", None
        except OSError as error:
            return "full", f"the coordinator's disk: {error}", None
        if isinstance(call, Publish) and isinstance(answer, Published):
            file = self._front.coordinator.weights_file(call.weights, answer.digest)
            await asyncio.to_thread(self._shelf.put, call.weights, answer.digest, file)
        return "ok", encode(answer), {name: _array(data) for name, data in answer_blobs.items()}

    async def weights(self, weights: WeightsKey, digest: str) -> "list[ray.ObjectRef[Any]]":
        """Return the reference to the weights, in a list because Ray would resolve a bare reference.

        Empty: the weights are obsolete.
        """
        ref = self._shelf.find(weights, digest)
        if ref is None:
            # This process started after the publish: read the weights from the book on disk.
            try:
                file = self._front.coordinator.weights_file(weights, digest)
                await asyncio.to_thread(self._shelf.put, weights, digest, file)
            except (KeyError, FileNotFoundError):
                return []
            ref = self._shelf.find(weights, digest)
        return [] if ref is None else [ref]

    async def _in_loop(self, coroutine: Any) -> Any:
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(coroutine, self._loop))


class _Shelf:
    """Published weights in the object store: the newest versions, each as one array of bytes."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._refs: dict[WeightsKey, tuple[str, ray.ObjectRef[Any]]] = {}

    def put(self, weights: WeightsKey, digest: str, file: Path) -> None:
        """Copy a file of weights into the object store, from its pages: Ray copies without Python's lock.

        Raises FileNotFoundError if the weights are obsolete.
        """
        with self._lock:
            if self.find(weights, digest) is None:
                with file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, prot=mmap.PROT_READ) as pages:
                    array = _array(pages)
                    self._refs[weights] = (digest, ray.put(array))
                    del array  # the pages cannot be closed while an array shows them
            versions = sorted(
                (key for key in self._refs if key.average == weights.average), key=lambda key: key.version
            )
            for key in versions[:-VERSIONS_KEPT]:
                del self._refs[key]

    def find(self, weights: WeightsKey, digest: str) -> "ray.ObjectRef[Any] | None":
        ref_digest, ref = self._refs.get(weights, ("", None))
        return ref if ref_digest == digest else None


class RayTransport:
    """A `Transport` to the coordinator actor. Several threads may call at once."""

    def __init__(self, token: str, *, patience_seconds: float) -> None:
        self._token, self._patience = token, patience_seconds
        self._actor: Any = None

    def call(self, head: Mapping[str, Any], blobs: Blobs | None = None, *, wait: bool = False) -> Answer:
        whole = {**head, "wait_ms": WAIT_MS} if wait else dict(head)
        arrays = {name: _array(data) for name, data in (blobs or {}).items()}
        answer, blob_arrays = when_there_is_room(lambda: self._ask(whole, arrays), _print)
        return answer, {name: array.tobytes() for name, array in blob_arrays.items()}

    def _ask(self, head: Head, arrays: dict[str, np.ndarray]) -> tuple[Any, Any]:
        """Call the actor once. Raises OSError if the coordinator's disk is full, CallRefused if the call is refused."""
        reply, answer, blobs = self.request("call", self._token, head, arrays)
        if reply == "full":
            raise OSError(errno.ENOSPC, answer)
        if reply == "refused":
            raise CallRefused(f"{head['call']}: {answer}")
        return answer, blobs

    def request(self, method: str, *arguments: Any) -> Any:
        """Call a method of the actor, and repeat the call while Ray restarts the actor.

        Raises CoordinatorLost when patience ends.
        """
        try:
            for attempt in stamina.retry_context(
                on=_is_passing, attempts=None, timeout=self._patience, wait_initial=0.02, wait_max=0.2
            ):
                with attempt:
                    if self._actor is None:
                        self._actor = ray.get_actor(NAME, namespace=NAMESPACE)
                    return ray.get(getattr(self._actor, method).remote(*arguments), timeout=ANSWER_SECONDS)
        except (RayError, ValueError) as error:
            if not _is_passing(error):
                raise CallRefused(f"{method}: {error}") from error
            raise CoordinatorLost(f"no answer for {self._patience:.0f} s: {error}") from error


class RayWeights:
    """A `WeightSource` on the object store: one copy per node, mapped read-only."""

    def __init__(self, transport: RayTransport) -> None:
        self._transport = transport
        self._held: dict[str, np.ndarray] = {}

    @contextlib.contextmanager
    def get(self, weights: WeightsKey, digest: str) -> Iterator[Stored | None]:
        array = self._held.get(digest)
        if array is None:
            array = self._fetch(weights, digest)
        yield None if array is None else Stored.of_bytes(array.data)

    def _fetch(self, weights: WeightsKey, digest: str) -> np.ndarray | None:
        refs: Sequence[ray.ObjectRef[Any]] = self._transport.request("weights", weights, digest)
        if not refs:
            return None
        try:
            array: np.ndarray = ray.get(refs[0], timeout=ARRIVAL_SECONDS)
        except RayError as error:
            print(f"weights {weights} did not come: {error}", flush=True)
            return None  # the coordinator died in the meantime; the next pull repeats the request
        # The held array keeps the weights on this node for workers started later.
        while len(self._held) >= VERSIONS_KEPT:
            self._held.pop(next(iter(self._held)))
        self._held[digest] = array
        return array


def pid_file(spec: NodeSpec) -> Path:
    """Return the file with the coordinator's pid, for the supervisor on the same node."""
    return Path(spec.folder) / "coordinator.json"


def _is_passing(error: Exception) -> bool:
    """Return True if a later call to Ray may succeed. A method's own error would recur."""
    if isinstance(error, ValueError):
        return "Failed to look up actor" in str(error)
    return isinstance(error, RayError) and not isinstance(error, RayTaskError)


def _array(data: Any) -> np.ndarray:
    return np.frombuffer(data, dtype=np.uint8)


def _only_one(path: Path) -> Any:
    """Hold this lock until the process ends: two coordinators must never write one journal."""
    lock = path.open("w")
    until = time.monotonic() + LOCK_SECONDS
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return lock
        except BlockingIOError:
            if time.monotonic() > until:
                raise
            time.sleep(0.05)


def _print(text: str) -> None:
    print(f"coordinator: {text}", flush=True)
