"""Membership of sequence-parallel groups: observed workers, wanted groups and orders, in the coordinator.

pulls of workers -> wanted groups (engine/parallel/groups.py) -> leave -> all members wait -> join

A group is formed in two steps, so no worker waits for a peer in the middle of a long denoising step. First, a worker of
another group is ordered to leave: the worker ends its step, hands back its work and pulls. When all members of a wanted
group have pulled, each member gets the same order to join: an epoch, its rank, and the number of the communicator. The
communicator is reused if the same processes share a live communicator. While all members wait, the communicators of
the group's aligned parts are made too. When a member dies, the rest of the group then needs no new communicator. The
promises:

- an epoch or a communicator number is issued once, to a fixed set of processes; a restarted worker process, or a worker
  with a torn communicator, gets new numbers only
- an order to join is given only while every member waits for the order, and joining therefore takes milliseconds
- after a group tears, no new group forms before its survivors have called in or `SETTLING_SECONDS` have passed
- a group is no promise to the queue: a dissolved group hands its work back, and only a lease gives a right to work

Pure: no clock, no I/O. The caller passes in the calls, the lost workers and the time.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from msgspec.structs import replace

from engine.coordinator.communicators import Communicators
from engine.coordinator.settling import SettlingPeers
from engine.parallel.worker_group import WorkerGroup, aligned_subsets, node_of
from engine.protocol.request import ALONE, Regroup


def alone(worker: str) -> Regroup:
    """Return the order to work outside every group."""
    return Regroup(epoch=ALONE, rank=0, degree=1, members=(worker,), communicator=ALONE)


Planner = Callable[[Sequence[str], Sequence[WorkerGroup]], Sequence[WorkerGroup]]
"""(live workers, existing groups) -> wanted groups: `plan_groups` with the caller's knowledge of the demand."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Formed:
    """A group that was ordered to form."""

    epoch: int
    communicator: int
    members: tuple[str, ...]
    """Workers in rank order. The first member pulls."""
    prepare: tuple[tuple[int, tuple[str, ...]], ...]
    """Extra communicators made with the group, as (number, their members)."""


@dataclass(slots=True)
class _Member:
    boot: int
    epoch: int = ALONE
    """The epoch reported by the worker."""
    ordered: int = ALONE
    """The epoch last sent to the worker."""
    waits: bool = False
    """True if the worker has pulled and has had no work since."""
    live: bool = True


class Membership:
    """The SP membership of all nodes. The module docstring lists the promises."""

    def __init__(self, *, settling_ms: int, first: int = 1) -> None:
        """Start without members.

        `settling_ms`: `SETTLING_SECONDS` (settling.py) on the run's clock.
        `first`: first number for epochs and communicators, above every number issued by an earlier coordinator.
        """
        self._settling = SettlingPeers(settling_ms=settling_ms)
        self.communicators = Communicators(first=max(first, ALONE + 1))
        self._members: dict[str, _Member] = {}
        self._wanted: dict[str, tuple[str, ...]] = {}
        """By worker: the members of the worker's wanted group."""
        self._formed: dict[int, Formed] = {}
        """By epoch: groups ordered to form and not yet ordered to leave."""

    # --- calls and losses

    def pulled(self, worker: str, boot: int, epoch: int, torn: Iterable[int] = (), *, now_ms: int) -> bool:
        """Record a pull of an idle worker. `epoch`: its current group. `torn`: communicators that broke in the worker.

        Return True if the set of live workers changed, which requires a new plan.
        """
        member = self._members.get(worker)
        changed = member is None or not member.live
        if member is None or boot > member.boot:
            if member is not None:
                self._forget(worker, member)
            member = self._members[worker] = _Member(boot=boot)
            changed = True
        elif boot < member.boot:
            return False  # a newer process of this worker has called in
        member.live, member.waits = True, True
        self._settling.called(worker)
        for number in torn:
            changed |= self._tore(number, worker, now_ms)
        member.epoch = epoch
        ordered = self._formed.get(member.ordered)
        if epoch == ALONE and (ordered is None or worker not in ordered.members):
            member.ordered = ALONE  # the worker has left; otherwise the order has not arrived yet
        return changed

    def busy(self, worker: str) -> None:
        """Record a worker's new work."""
        if worker in self._members:
            self._members[worker].waits = False

    def gone(self, workers: Iterable[str]) -> bool:
        """Record the death of workers, or the drain of their node. Return True if the set of live workers changed."""
        changed = False
        for worker in workers:
            self._settling.called(worker)
            member = self._members.get(worker)
            if member is not None and member.live:
                self._forget(worker, member)
                member.live = member.waits = False
                changed = True
        return changed

    def settled(self, now_ms: int) -> bool:
        """Stop waiting for overdue peers. Return True if a worker may now go on."""
        return self._settling.drop_overdue(now_ms)

    # --- wanted groups

    def plan(self, planner: Planner) -> None:
        """Replace the wanted groups with the planner's result."""
        live = sorted((worker for worker, member in self._members.items() if member.live), key=_by_place)
        groups = planner(live, [WorkerGroup(members=formed.members) for formed in self._formed.values()])
        self._wanted = {worker: group.members for group in groups for worker in group.members}
        for epoch, formed in list(self._formed.items()):
            if any(self._wanted.get(worker) != formed.members for worker in formed.members):
                del self._formed[epoch]

    def groups(self) -> list[Formed]:
        """Return the known existing groups. Workers outside every group are left out."""
        return [formed for _, formed in sorted(self._formed.items())]

    def wanted(self) -> dict[str, tuple[str, ...]]:
        """Return, by live worker, the members of the worker's wanted group."""
        return dict(self._wanted)

    def nodes(self) -> set[str]:
        """Return the nodes with a live worker."""
        return {node_of(worker) for worker, member in self._members.items() if member.live}

    def workers_of(self, node: str) -> list[str]:
        """Return all known workers of a node."""
        return [worker for worker in self._members if node_of(worker) == node]

    def layouts(self) -> dict[str, tuple[tuple[str, ...], ...]]:
        """Return the groups of each node; a worker outside every group counts as a group of its own.

        Nodes with a worker not yet in its wanted group are left out.
        """
        found: dict[str, set[tuple[str, ...]]] = {}
        unsettled = self._settling.nodes()
        for worker, member in self._members.items():
            if member.live:
                here = self._here(worker, member)
                found.setdefault(node_of(worker), set()).add(here)
                if here != self._wanted.get(worker):
                    unsettled.add(node_of(worker))
        return {
            node: tuple(sorted(groups, key=lambda group: _by_place(group[0])))
            for node, groups in sorted(found.items())
            if node not in unsettled
        }

    def _here(self, worker: str, member: "_Member") -> tuple[str, ...]:
        """Return the members of the worker's current group, as far as known. Followers report only when idle."""
        formed = self._formed.get(member.epoch) or self._formed.get(member.ordered)
        if formed is None or self._members[formed.members[0]].epoch != formed.epoch:
            return (worker,)
        return formed.members

    def leads(self, worker: str) -> bool:
        """Return True if the worker may get work.

        A worker outside every group gets work unless a group is wanted for the worker. In a group, only the first
        member gets work, and only once the group is formed.
        """
        member = self._members.get(worker)
        if member is None or not member.live:
            return True  # not a worker that can join groups
        if member.epoch == ALONE:
            alone = member.ordered == ALONE and len(self._wanted.get(worker, (worker,))) == 1
            return alone and node_of(worker) not in self._settling.nodes()
        formed = self._formed.get(member.epoch)
        return formed is not None and formed.members[0] == worker

    def must_come(self, worker: str) -> bool:
        """Return True if a busy worker should hand back its work and pull, because another group is wanted."""
        member = self._members.get(worker)
        if member is None or not member.live:
            return False
        here = self._here(worker, member)
        return here != self._wanted.get(worker, here) or (member.epoch != ALONE and member.epoch not in self._formed)

    # --- orders

    def order(self, worker: str) -> Regroup | None:
        """Return the regroup order for a pulling worker. None: work or wait (`leads` decides)."""
        member = self._members.get(worker)
        if member is None or not member.live:
            return None
        if member.epoch != ALONE and member.epoch not in self._formed:
            member.ordered = ALONE
            return replace(alone(worker), keep=self.communicators.of_process((worker, member.boot)))
        if member.epoch == ALONE and member.ordered == ALONE:
            self._form(self._wanted.get(worker, (worker,)))
        formed = self._formed.get(member.ordered)
        if formed is None or member.epoch == formed.epoch:
            return None
        return Regroup(
            epoch=formed.epoch,
            rank=formed.members.index(worker),
            degree=len(formed.members),
            members=formed.members,
            communicator=formed.communicator,
            prepare=tuple((n, some.index(worker), len(some)) for n, some in formed.prepare if worker in some),
            keep=self.communicators.of_process((worker, member.boot)),
        )

    def _form(self, wanted: tuple[str, ...]) -> None:
        """Order the members to form a group if all of them wait."""
        members = [self._members.get(worker) for worker in wanted]
        ready = [m for m in members if m and m.live and m.waits and m.epoch == m.ordered == ALONE]
        if len(wanted) < 2 or len(ready) < len(wanted) or node_of(wanted[0]) in self._settling.nodes():
            return
        epoch = self.communicators.issue_number()
        before = self.communicators.next_number
        communicators = [
            (self.communicators.shared_by([(worker, self._members[worker].boot) for worker in some]), some)
            for some in (*_aligned_in(wanted), wanted)
        ]
        prepare = tuple((number, some) for number, some in communicators[:-1] if number >= before)
        self._formed[epoch] = Formed(epoch=epoch, communicator=communicators[-1][0], members=wanted, prepare=prepare)
        for member in ready:
            member.ordered = epoch

    # --- torn groups and dead processes

    def _tore(self, number: int, worker: str, now_ms: int) -> bool:
        """Retire a broken communicator. The other members of its group count as gone until their next call."""
        self.communicators.retire(number)
        torn = [formed for formed in self._formed.values() if formed.communicator == number]
        for formed in torn:
            del self._formed[formed.epoch]
            for other in formed.members:
                member = self._members[other]
                if other != worker and member.live and (member.epoch, member.ordered) != (ALONE, ALONE):
                    member.live = member.waits = False
                    self._settling.wait_for(other, now_ms)
        return bool(torn)

    def _forget(self, worker: str, member: _Member) -> None:
        """Remove a dead process, its groups and its communicators."""
        self.communicators.forget((worker, member.boot))
        for epoch, formed in list(self._formed.items()):
            if worker in formed.members:
                del self._formed[epoch]


def _aligned_in(members: tuple[str, ...]) -> list[tuple[str, ...]]:
    """Return the aligned subsets of a group. Smaller groups may follow after a member's death or with more demand."""
    places = {_by_place(worker)[1]: worker for worker in members}
    degrees = [degree for degree in (2, 4, 8) if degree < len(members)]
    subsets = aligned_subsets(max(places) + 1, degrees)
    return [tuple(places[place] for place in some) for some in subsets if places.keys() >= set(some)]


def _by_place(worker: str) -> tuple[str, int]:
    node, _, place = worker.rpartition("/")
    return node, int(place)
