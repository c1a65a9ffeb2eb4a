"""The on-demand node of a drill: the real agent and coordinator, with a proxy for the test in the trainer's place.

    python -m tests.conformance.on_demand node.json

The proxy ("seat") owns the trainer's transport, and forwards the calls that it gets over a Unix socket.
"""

import sys
import threading
from collections.abc import Callable, Mapping
from multiprocessing.connection import Client, Connection, Listener
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

import engine.node.agent
from engine.node.agent import Agent
from engine.node.child import SharedHeartbeat, begin
from engine.node_spec import NodeSpec
from engine.protocol.codec import Blobs
from engine.worker.transport import Answer, CallRefused


class OnDemand(Agent):
    """An agent that runs the seat in place of the trainer."""

    def _child(self, name: str, runs: str, *arguments: Any) -> Any:
        ready = super()._child(name, runs, *arguments)
        if runs == "run_trainer":
            child, spec_json = self.children[-1], self.spec.model_dump_json()

            def start() -> Any:
                process = self.context.Process(target=run_seat, args=(spec_json, child.heartbeat, ready))
                process.start()
                return process

            child.start = start
        return ready


def run_seat(spec_json: str, heartbeat: SharedHeartbeat, ready: Event) -> None:
    """Serve until the agent ends this process."""
    from engine.entrypoints.processes import _transport_of_trainer

    spec = NodeSpec.model_validate_json(spec_json)
    begin(spec, "trainer", heartbeat)
    transport = _transport_of_trainer(spec)
    path = seat_of(Path(spec.folder))
    path.unlink(missing_ok=True)
    listener = Listener(str(path), "AF_UNIX", backlog=16)
    ready.set()
    while True:
        threading.Thread(target=_serve, args=(listener.accept(), transport.call), daemon=True).start()


def _serve(connection: Connection, call: Callable[..., Answer]) -> None:
    while True:
        try:
            head, blobs, wait = connection.recv()
        except EOFError:
            return
        try:
            answer: Answer | CallRefused = call(head, blobs, wait=wait)
        except CallRefused as error:
            answer = error
        connection.send(answer)


def seat_of(folder: Path) -> Path:
    return folder / "seat"


class SeatLine:
    """A `Transport` through the seat, with one connection per thread."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._local = threading.local()

    def call(self, head: Mapping[str, Any], blobs: Blobs | None = None, *, wait: bool = False) -> Answer:
        if not hasattr(self._local, "connection"):
            self._local.connection = Client(str(seat_of(self._folder)), "AF_UNIX")
        self._local.connection.send((dict(head), blobs, wait))
        answer = self._local.connection.recv()
        if isinstance(answer, CallRefused):
            raise answer
        return answer


if __name__ == "__main__":
    engine.node.agent.Agent = OnDemand  # type: ignore[misc]
    sys.exit(engine.node.agent.main())
