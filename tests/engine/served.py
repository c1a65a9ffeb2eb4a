"""A coordinator behind its HTTP front on loopback, in a thread of the test process, so a test can inspect it."""

import threading
import time

import uvicorn

from engine.clock import ScaledClock
from engine.config import RuntimeConfig
from engine.coordinator.open import open_coordinator
from engine.coordinator.rights import Rights
from engine.coordinator.server import CoordinatorServer, Front, bind
from engine.node_spec import role_token
from engine.protocol.codec import encode
from engine.worker.transport import HttpTransport
from tests.engine.fleet import TOKEN


class Served:
    """A coordinator behind HTTP. `calls`: every received head with its monotonic time."""

    def __init__(self, folder, runtime=None, *, port=0, ranks=None):
        clock = ScaledClock(origin_ms=time.time_ns() // 1_000_000)
        self.coordinator = open_coordinator(folder, clock=clock, runtime=runtime or RuntimeConfig())
        self.calls = []
        answer = self.coordinator.handle

        def handle(call, blobs):
            self.calls.append((time.monotonic(), encode(call)))
            return answer(call, blobs)

        self.coordinator.handle = handle
        find = self.coordinator.weights_file

        def weights_file(weights, digest):
            self.calls.append((time.monotonic(), {"call": "weights", "digest": digest}))
            return find(weights, digest)

        self.coordinator.weights_file = weights_file
        self._listener = bind("127.0.0.1", port)
        self.port = self._listener.getsockname()[1]
        app = CoordinatorServer(Front(self.coordinator), Rights(TOKEN), ranks=ranks).app
        self._server = uvicorn.Server(uvicorn.Config(app, log_level="warning", ws="none", timeout_graceful_shutdown=1))
        self._thread = threading.Thread(target=self._server.run, args=([self._listener],))
        self._thread.start()

    def transport(self):
        return HttpTransport("127.0.0.1", self.port, role_token(TOKEN, "trainer"), patience_seconds=30.0)

    def of(self, name):
        return [(at, head) for at, head in self.calls if head["call"] == name]

    def close(self):
        self._server.should_exit = True
        self._thread.join()
        self._listener.close()
