"""A worker's calls to the coordinator.

Each call carries the name, the boot number and the node of the worker, and the worker's usage since its last call.
"""

import contextlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from msgspec.structs import replace

from engine.events import Phase
from engine.protocol.codec import Blobs, decode_reply, encode
from engine.protocol.messages import (
    Commit,
    CommittedState,
    Fault,
    FetchStates,
    Finish,
    GiveBack,
    GroupReport,
    Heartbeat,
    HeldWeights,
    LeaseCall,
    Pull,
    Result,
    StepTime,
)
from engine.protocol.request import Kind, Reply, WeightsKey
from engine.worker.transport import Transport, ask
from engine.worker.usage import Usage


@dataclass(kw_only=True)
class CoordinatorCalls:
    """Calls of one process of a worker. Raises the errors of the transport.

    `commit` may be called from a second thread: it reports no usage. All other calls come from one thread.
    """

    transport: Transport
    usage: Usage
    worker: str
    node: str
    workers_of_node: int
    boot: int
    reports_usage: bool = True
    """False while a thread makes the calls beside the thread whose time is measured."""
    last: float = field(default_factory=time.perf_counter, init=False)
    """Time of the newest answer (`time.perf_counter`)."""
    _pulls: int = field(default=0, init=False)

    def pull(
        self,
        *,
        holds: tuple[WeightsKey, str] | None,
        kinds: Sequence[Kind],
        most_images: int | None,
        group: GroupReport | None,
        wait: bool,
    ) -> Reply:
        """Ask for work.

        `holds`: the loaded weights and their digest. `most_images`: the most images of a forward pass that fit into
        memory.
        """
        self._pulls += 1
        held = None
        if holds is not None:
            weights, digest = holds
            held = HeldWeights(version=weights.version, average=weights.average, digest=digest)
        call = Pull(
            worker=self.worker,
            node=self.node,
            boot=self.boot,
            seq=self._pulls,
            holds=held,
            kinds=tuple(kinds),
            most_images=most_images,
            group=group,
        )
        return self._call(call, wait=wait)

    def heartbeat(self, leases: Mapping[int, int]) -> Reply:
        """Renew leases. `leases`: the current denoising step by lease number."""
        return self._call(Heartbeat(worker=self.worker, node=self.node, leases=dict(leases)))

    def finish(
        self, lease: int, results: Sequence[Result], blobs: Blobs, pace: StepTime | None, *, hangs: str = ""
    ) -> Reply:
        call = Finish(worker=self.worker, node=self.node, lease=lease, results=tuple(results), pace=pace, hangs=hangs)
        return self._call(call, blobs)

    def give_back(self, lease: int) -> None:
        self._call(GiveBack(worker=self.worker, node=self.node, lease=lease))

    def fault(self, lease: int, text: str, *, hangs: bool = False) -> None:
        self._call(Fault(worker=self.worker, node=self.node, lease=lease, text=text, hangs=hangs))

    def commit(self, lease: int, states: Sequence[CommittedState], blobs: Blobs, commit_ms: float | None) -> Reply:
        """Make the in-flight state of a lease durable. `commit_ms`: the duration of the last commit."""
        call = Commit(
            worker=self.worker,
            node=self.node,
            boot=self.boot,
            of=self.workers_of_node,
            lease=lease,
            states=tuple(states),
            commit_ms=commit_ms,
        )
        answer, _ = self.transport.call(encode(call), blobs)
        return decode_reply(answer)

    def states(self, names: Sequence[str]) -> Mapping[str, bytes]:
        """Return committed states by blob name."""
        _, states = ask(self.transport, FetchStates(names=tuple(names)))
        return states

    def _call(self, call: LeaseCall, blobs: Blobs | None = None, *, wait: bool = False) -> Reply:
        usage = tuple(self.usage.take()) if self.reports_usage else ()
        whole = replace(call, boot=self.boot, of=self.workers_of_node, usage=usage)
        with self.usage.measure(Phase.SYNC) if self.reports_usage and not wait else contextlib.nullcontext():
            answer, _ = self.transport.call(encode(whole), blobs, wait=wait)
        self.last = time.perf_counter()
        return decode_reply(answer)
