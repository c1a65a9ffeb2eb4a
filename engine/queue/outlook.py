"""The rollouts of a batch that wait or are under way, for the trainer's schedule. Read-only.

waiting requests, in the order of leases; open leases with their expected ends; workers without a lease
"""

from engine.protocol.messages import Outlook, UnderWay, Waiting
from engine.protocol.request import TRAINED, Kind, RequestId
from engine.queue.leases import Lease
from engine.queue.state import QueueState


def outlook(state: QueueState, batch: int, *, now_ms: int, silence_ms: int) -> Outlook:
    """Return the outlook on a batch. `silence_ms`: a worker silent for longer counts as gone."""

    def is_wanted(request: RequestId) -> bool:
        return request.kind in TRAINED and request.batch == batch

    def under_way(lease: Lease) -> UnderWay:
        return UnderWay(
            worker=lease.worker,
            left_ms=max(0.0, lease.end_ms(now_ms, silence_ms) - now_ms),
            steps_left=lease.of.task.steps - lease.step,
            images=tuple((request.prompt, request.seed) for request in lease.requests if is_wanted(request)),
        )

    leases = tuple(under_way(lease) for lease in state.leases.open.values() if not lease.copy)
    busy = {lease.worker for lease in leases}
    live = set(state.members.live_nodes(state.leases.nodes(), now_ms, silence_ms))
    idle = sorted(
        worker.name for worker in state.members.workers.values() if worker.node in live and worker.name not in busy
    )
    waiting = tuple(
        Waiting(prompt=request.prompt, seed=request.seed, step=entry.attempt.step, is_old=kind is Kind.EARLY)
        for kind in TRAINED
        for request, entry in state.backlog.items(kind)
        if is_wanted(request)
    )
    paces = (entry.of.pace.step_ms for request, entry in state.requests.items() if is_wanted(request))
    return Outlook(waiting=waiting, leases=leases, idle=tuple(idle), step_ms=next(paces, 0.0))
