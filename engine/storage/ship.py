"""Copy logs away from a node before the node is gone.

spot node: bytes appended to its logs -> POST /ship -> `shipped/NODE/FILE` in the trainer's folder
trainer:   its own logs and progress, and shipped/ -> `<store>/logs/NODE/FILE`, every 30 s
           its metrics.jsonl and TensorBoard's files -> `<store>/metrics/NODE/...`, every 30 s
any node ending without a controller (alone.py): its own files to the store, once

The coordinator's copy determines the next offset, so a lost answer, a new agent or a new trainer neither loses nor
doubles bytes. Neither direction ever blocks the run: each is a thread of the agent, and failed transfers are repeated.
"""

import contextlib
import re
import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path

import httpx

from engine.node_spec import NodeSpec

SHIP_SECONDS = 1.0
STORE_SECONDS = 30.0
LAST_SHIP_SECONDS, LAST_STORE_SECONDS = 2.0, 10.0
"""Seconds an ending agent allows for the last transfer."""
LONGEST_GAP_SECONDS = 10.0

PIECE_BYTES = 256 << 10
LONGEST_LOG_BYTES = 64 << 20
"""Maximum bytes per file: shipping stops there, and the store gets only the end of a longer file."""

NODE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9-]{0,62}")
FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}\.log")


class NotShippable(ValueError):
    """Invalid node name, file name or size, never sent by an agent."""


def keep_piece(shipped: Path, node: str, file: str, offset: int, piece: bytes) -> int:
    """Append a piece on the coordinator's side, if the piece is the next one.

    Returns the size of the coordinator's file.

    Raises NotShippable, and OSError if the disk is full.
    """
    if not NODE_NAME.fullmatch(node) or not FILE_NAME.fullmatch(file):
        raise NotShippable(f"{node!r} is no node's name or {file!r} no log's")
    path = shipped / node / file
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with path.open("ab", buffering=0) as log:
        size = log.tell()
        if offset == size and size + len(piece) <= LONGEST_LOG_BYTES:
            size += log.write(piece) or 0
    return size


class _Repeating(ABC):
    """Task repeated at an interval in its own thread. After failures the interval grows."""

    what = ""

    def __init__(self, every_seconds: float, last_seconds: float, starts: bool = True) -> None:
        """`starts`: start the thread at once; otherwise only `once` is called."""
        self._every, self._last = every_seconds, last_seconds
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        if starts:
            self._thread.start()

    @abstractmethod
    def once(self) -> None: ...

    def end(self) -> None:
        """Run the task a last time, within the time limit."""
        self._ending.set()
        self._thread.join(self._last)

    def _run(self) -> None:
        gap, trouble = self._every, ""
        while True:
            is_last = self._ending.wait(gap)
            try:
                self.once()
                gap, trouble = self._every, ""
            except Exception as error:
                # Catch all errors, httpx's and obstore's: a failed log transfer must not cost a node.
                if not trouble:
                    with contextlib.suppress(OSError):
                        print(f"{self.what}: {error!r}; trying again", flush=True)
                trouble, gap = repr(error), min(max(LONGEST_GAP_SECONDS, self._every), 2 * gap)
            if is_last:
                return


class Shipping(_Repeating):
    """Shipper of a spot node's logs to the coordinator."""

    what = "shipping logs to the coordinator"

    def __init__(self, spec: NodeSpec, *, every_seconds: float = SHIP_SECONDS) -> None:
        self._node, self._logs = spec.node, Path(spec.folder) / "logs"
        self._offsets: dict[str, int] = {}
        self._client = httpx.Client(
            base_url=f"http://{spec.coordinator_host}:{spec.coordinator_port}",
            headers={"Authorization": f"Bearer {spec.own_token}"},
            timeout=5.0,
            trust_env=False,
        )
        super().__init__(every_seconds, LAST_SHIP_SECONDS)

    def once(self) -> None:
        for path in sorted(self._logs.glob("*.log")):
            while self._ship_piece(path):
                pass

    def _ship_piece(self, path: Path) -> bool:
        """Send the next piece. Returns True if more bytes wait and the coordinator accepts more."""
        offset = self._offsets.get(path.name)
        if offset is not None and offset + PIECE_BYTES > LONGEST_LOG_BYTES:
            return False
        with path.open("rb") as log:
            log.seek(offset or 0)
            piece = b"" if offset is None else log.read(PIECE_BYTES)
        if offset is not None and not piece:
            return False
        query: dict[str, str | int] = {"node": self._node, "file": path.name, "offset": offset or 0}
        response = self._client.post("/ship", params=query, content=piece).raise_for_status()
        size = int(response.json()["offset"])
        self._offsets[path.name] = size
        return offset is None or size != offset


class StoreCopy(_Repeating):
    """Copier of a node's logs, progress and metrics to the run's store."""

    what = "copying logs to the store"

    def __init__(self, spec: NodeSpec, *, every_seconds: float = STORE_SECONDS, starts: bool = True) -> None:
        self._node, self._folder, self._url = spec.node, Path(spec.folder), spec.store
        self._copied: dict[str, tuple[int, int]] = {}
        super().__init__(every_seconds, LAST_STORE_SECONDS, starts)

    def once(self) -> None:
        # Import here only: other nodes need no store library, and the library looks for credentials when opened.
        from engine.storage.checkpoint import CheckpointStore

        store = CheckpointStore(self._url)
        for name, path in self._files().items():
            status = path.stat()
            if self._copied.get(name) == (status.st_size, status.st_mtime_ns):
                continue
            with path.open("rb") as file:
                file.seek(max(0, status.st_size - LONGEST_LOG_BYTES))
                data = file.read(LONGEST_LOG_BYTES)
            # A node that ended by itself stored its own log, which may be longer than the coordinator's copy.
            if not path.is_relative_to(self._folder / "shipped") or store.size(name) <= len(data):
                store.put(name, data)
            self._copied[name] = (status.st_size, status.st_mtime_ns)

    def _files(self) -> Mapping[str, Path]:
        """Return the files to copy, by name in the store."""
        own = [*self._folder.glob("logs/*.log"), *self._folder.glob("progress/*.jsonl")]
        of_others = self._folder.glob("shipped/*/*.log")
        metrics = self._folder / "metrics"
        measured = [metrics / "metrics.jsonl", *metrics.glob("tensorboard/*tfevents*")]
        return {
            **{f"logs/{self._node}/{path.name}": path for path in own},
            **{f"logs/{path.parent.name}/{path.name}": path for path in of_others},
            **{f"metrics/{self._node}/{path.relative_to(metrics)}": path for path in measured if path.exists()},
        }


def main() -> None:
    """Copy a node's files to its run's store, once: for a node about to end, with its coordinator possibly gone.

    Raises the store's errors.
    """
    spec = NodeSpec.model_validate_json(Path(sys.argv[1]).read_text())
    StoreCopy(spec, starts=False).once()
    print(f"the logs of {spec.node} are in {spec.store}", flush=True)


def begin_shipping(spec: NodeSpec) -> Shipping | StoreCopy | None:
    """Start the agent's log transfer. Returns None on the local infra, where logs stay readable anyway."""
    if spec.cloud == "local":
        return None
    return StoreCopy(spec) if spec.role == "trainer" else Shipping(spec)


if __name__ == "__main__":
    main()
