"""Membership of sequence-parallel groups: observed workers, wanted groups and orders, in the coordinator.

pulls of workers -> wanted groups (engine/parallel/groups.py) -> leave -> all members wait -> join

A group is formed in two steps, so no worker waits for a peer in the middle of a long denoising step. First, a worker of
another group is ordered to leave: the worker ends its step, hands back its work and pulls. When all members of a wanted
group have pulled, each member gets the same order to join: an epoch, its rank, and the number of the communicator. The
communicator is reused if the same processes share a live communicator. While all members wait, the communicators of
the group's aligned parts, (0, 1), (2, 3), (0..3) and so on, are made too. When a member dies, the rest of the group
then needs no new communicator. The promises:

- an epoch or a communicator number is issued once, to a fixed set of processes; a restarted worker process, or a worker
  with a torn communicator, gets new numbers only
- an order to join is given only while every member waits for the order, and joining therefore takes milliseconds
- after a group tears, no new group forms before its survivors have called in or `SETTLING_SECONDS` have passed
- the queue does not rely on groups: a dissolved group hands its work back, and only a lease gives a right to work

Pure: no clock, no I/O. The caller passes in the calls, the lost workers and the time.
"""

from collections.abc import Callable, Iterable, Sequence

from msgspec.structs import replace

from engine.coordinator.communicators import Communicators
from engine.coordinator.group_table import Formed, GroupTable, Member, by_place
from engine.coordinator.settling import SettlingPeers
from engine.parallel.worker_group import WorkerGroup, aligned_subsets, node_of
from engine.protocol.request import ALONE, Regroup


def alone(worker: str) -> Regroup:
    """Return the order to work outside every group."""
    return Regroup(epoch=ALONE, rank=0, degree=1, members=(worker,), communicator=ALONE)


Planner = Callable[[Sequence[str], Sequence[WorkerGroup]], Sequence[WorkerGroup]]
"""(live workers, existing groups) -> wanted groups: `plan_groups` with the caller's knowledge of the demand."""


class Membership:
    """The SP membership of all nodes. The module docstring lists the promises."""

    def __init__(self, *, settling_ms: int, first: int = 1) -> None:
        """Start without members.

        `settling_ms`: `SETTLING_SECONDS` (settling.py) on the run's clock.
        `first`: first number for epochs and communicators, above every number issued by an earlier coordinator.
        """
        self._settling = SettlingPeers(settling_ms=settling_ms)
        self.communicators = Communicators(first=max(first, ALONE + 1))
        self.table = GroupTable()

    # --- calls and losses

    def pulled(self, worker: str, boot: int, epoch: int, torn: Iterable[int] = (), *, now_ms: int) -> bool:
        """Record a pull of an idle worker. `epoch`: its current group. `torn`: communicators that broke in the worker.

        Return True if the set of live workers changed, which requires a new plan.
        """
        member = self.table.members.get(worker)
        changed = member is None or not member.live
        if member is None or boot > member.boot:
            if member is not None:
                self._forget(worker, member)
            member = self.table.members[worker] = Member(boot=boot)
            changed = True
        elif boot < member.boot:
            return False  # a newer process of this worker has called in
        member.live, member.waits = True, True
        self._settling.called(worker)
        for number in torn:
            changed |= self._tore(number, worker, now_ms)
        member.epoch = epoch
        ordered = self.table.formed.get(member.ordered)
        if epoch == ALONE and (ordered is None or worker not in ordered.members):
            member.ordered = ALONE  # the worker has left; otherwise the order has not arrived yet
        return changed

    def busy(self, worker: str) -> None:
        """Record a worker's new work."""
        if worker in self.table.members:
            self.table.members[worker].waits = False

    def gone(self, workers: Iterable[str]) -> bool:
        """Record the death of workers, or the drain of their node. Return True if the set of live workers changed."""
        changed = False
        for worker in workers:
            self._settling.called(worker)
            member = self.table.members.get(worker)
            if member is not None and member.live:
                self._forget(worker, member)
                member.live = member.waits = False
                changed = True
        return changed

    def settled(self, now_ms: int) -> bool:
        """Stop waiting for overdue peers.

        Return True if there was one: waiting workers may then get orders.
        """
        return self._settling.drop_overdue(now_ms)

    # --- wanted groups

    def plan(self, planner: Planner) -> None:
        """Replace the wanted groups with the planner's result."""
        live = sorted((worker for worker, member in self.table.members.items() if member.live), key=by_place)
        groups = planner(live, [WorkerGroup(members=formed.members) for formed in self.table.formed.values()])
        self.table.wanted = {worker: group.members for group in groups for worker in group.members}
        for epoch, formed in list(self.table.formed.items()):
            if any(self.table.wanted.get(worker) != formed.members for worker in formed.members):
                del self.table.formed[epoch]

    def layouts(self) -> dict[str, tuple[tuple[str, ...], ...]]:
        """Return the groups of each node where every worker is in its wanted group (GroupTable.layouts)."""
        return self.table.layouts(self._settling.nodes())

    def leads(self, worker: str) -> bool:
        """Return True if the worker may get work.

        A worker outside every group gets work unless a group is wanted for the worker. In a group, only the first
        member gets work, and only once the group is formed.
        """
        member = self.table.live(worker)
        if member is None:
            return True  # not a worker that can join groups
        if member.epoch == ALONE:
            alone = member.ordered == ALONE and len(self.table.wanted.get(worker, (worker,))) == 1
            return alone and node_of(worker) not in self._settling.nodes()
        formed = self.table.formed.get(member.epoch)
        return formed is not None and formed.members[0] == worker

    def must_come(self, worker: str) -> bool:
        """Return True if a busy worker should hand back its work and pull, because another group is wanted."""
        member = self.table.live(worker)
        if member is None:
            return False
        group = self.table.group_of(worker, member)
        is_over = member.epoch != ALONE and member.epoch not in self.table.formed
        return is_over or group != self.table.wanted.get(worker, group)

    # --- orders

    def order(self, worker: str) -> Regroup | None:
        """Return the regroup order for a pulling worker. None: work or wait (`leads` decides)."""
        member = self.table.live(worker)
        if member is None:
            return None
        if member.epoch != ALONE and member.epoch not in self.table.formed:
            member.ordered = ALONE
            return replace(alone(worker), keep=self.communicators.of_process((worker, member.boot)))
        if member.epoch == ALONE and member.ordered == ALONE:
            self._form(self.table.wanted.get(worker, (worker,)))
        formed = self.table.formed.get(member.ordered)
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

    def _form(self, workers: tuple[str, ...]) -> None:
        """Order the members to form a group if all of them wait."""
        members = [self.table.members.get(worker) for worker in workers]
        ready = [m for m in members if m and m.live and m.waits and m.epoch == m.ordered == ALONE]
        if len(workers) < 2 or len(ready) < len(workers) or node_of(workers[0]) in self._settling.nodes():
            return
        epoch = self.communicators.issue_number()
        before = self.communicators.next_number
        communicators = [
            (self.communicators.shared_by([(worker, self.table.members[worker].boot) for worker in some]), some)
            for some in (*_aligned_in(workers), workers)
        ]
        prepare = tuple((number, some) for number, some in communicators[:-1] if number >= before)
        number = communicators[-1][0]
        self.table.formed[epoch] = Formed(epoch=epoch, communicator=number, members=workers, prepare=prepare)
        for member in ready:
            member.ordered = epoch

    # --- torn groups and dead processes

    def _tore(self, number: int, worker: str, now_ms: int) -> bool:
        """Retire a broken communicator, and return True if a known group used the communicator.

        The other members of the group count as gone until their next call.
        """
        self.communicators.retire(number)
        torn = [formed for formed in self.table.formed.values() if formed.communicator == number]
        for formed in torn:
            del self.table.formed[formed.epoch]
            for peer in formed.members:
                member = self.table.members[peer]
                if peer != worker and member.live and (member.epoch, member.ordered) != (ALONE, ALONE):
                    member.live = member.waits = False
                    self._settling.wait_for(peer, now_ms)
        return bool(torn)

    def _forget(self, worker: str, member: Member) -> None:
        """Remove a dead process, its groups and its communicators."""
        self.communicators.forget((worker, member.boot))
        self.table.dissolve(worker)


def _aligned_in(members: tuple[str, ...]) -> list[tuple[str, ...]]:
    """Return the aligned subsets of a group. Smaller groups may follow after a member's death or with more demand."""
    places = {by_place(worker)[1]: worker for worker in members}
    degrees = [degree for degree in (2, 4, 8) if degree < len(members)]
    subsets = aligned_subsets(max(places) + 1, degrees)
    return [tuple(places[place] for place in some) for some in subsets if places.keys() >= set(some)]
