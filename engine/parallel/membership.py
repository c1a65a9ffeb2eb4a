"""Who is in which sequence-parallel group: what the coordinator knows of it, wants of it, and orders.

heard from workers -> wanted groups (engine/parallel/groups.py) -> leave -> all members at the table -> join

A group is formed in two steps, so that nobody waits for a peer that is in the middle of a long denoising step. Whoever
should be elsewhere is told to leave: it ends its step, hands back its work and pulls. When all members of a wanted
group have pulled, each is given the same order to join: an epoch, its rank, and the number of the communicator, an old
one if the same processes had one that still lives. Along with a group the communicators of its aligned parts are made,
as all of them are at the table: when a member dies, what is left of the group need not make one. The promises:

- an epoch and a communicator's number are given out once, to one set of processes; a worker that comes back as another
  process, or whose communicator tore, meets new numbers only
- an order to join is given only when every member waits for it, so it is carried out in milliseconds
- when a group tears, its survivors are waited for before anything is formed anew, but no longer than `SETTLING_SECONDS`
- nothing here is a promise to the queue: a group that dissolves hands its work back, and a lease decides who speaks

Pure: no clock, no I/O. The caller says who called in, who is gone, and what time it is.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from engine.parallel.groups import WorkerGroup, aligned_subsets
from engine.rollout.request import Regroup

ALONE = 0
"""The epoch of a worker that shares with nobody."""

SETTLING_SECONDS = 0.3
"""Wall time. Peers of a dead process hear of it within 30 to 120 ms (research notes engine 3.4); to begin without one
of them means to regroup once more when it calls in."""


def node_of(worker: str) -> str:
    """A worker is named NODE/PLACE."""
    return worker.rpartition("/")[0]


def alone(worker: str) -> Regroup:
    """The order to share with nobody."""
    return Regroup(epoch=ALONE, rank=0, degree=1, members=(worker,), communicator=ALONE)


Planner = Callable[[Sequence[str], Sequence[WorkerGroup]], Sequence[WorkerGroup]]
"""(live workers, groups that exist) -> groups that should: `plan_groups` with what the caller knows of the demand."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Formed:
    """A group that was ordered."""

    epoch: int
    communicator: int
    members: tuple[str, ...]
    """In rank order; the first one pulls."""
    prepare: tuple[tuple[int, tuple[str, ...]], ...]
    """Communicators of some of them that are made along with it, and whose."""


@dataclass(slots=True)
class _Member:
    boot: int
    epoch: int = ALONE
    """What it says it is in."""
    ordered: int = ALONE
    """What it was last told to be in."""
    waits: bool = False
    """It has pulled, and was given nothing to do since."""
    live: bool = True


class Membership:
    """See the module's story. One for all nodes."""

    def __init__(self, *, settling_ms: int, first: int = 1) -> None:
        """`settling_ms`: `SETTLING_SECONDS` on the run's clock. `first`: epochs and communicators count from here:
        above any that an earlier coordinator gave."""
        self._settling_ms = settling_ms
        self._next = max(first, ALONE + 1)
        self._members: dict[str, _Member] = {}
        self._wanted: dict[str, tuple[str, ...]] = {}
        """By worker: the members of the group that it should be in."""
        self._formed: dict[int, Formed] = {}
        """By epoch: groups that were ordered and that nobody was told to leave."""
        self._communicators: dict[tuple[tuple[str, int], ...], int] = {}
        """By processes, in rank order: what they have in common and is not known to be torn."""
        self._missing: dict[str, int] = {}
        """Peers of a torn group who have not called in since, and until when they are waited for."""

    # --- what is heard

    def pulled(self, worker: str, boot: int, epoch: int, torn: Iterable[int] = (), *, now_ms: int) -> bool:
        """A worker has nothing to do and asks. `epoch`: of the group it is in. `torn`: communicators that broke on it.

        Returns whether this changes who there is, so that the groups should be planned anew.
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
        self._missing.pop(worker, None)
        for number in torn:
            changed |= self._tore(number, worker, now_ms)
        member.epoch = epoch
        if epoch == ALONE and member.ordered != ALONE and self._has_left(worker, member.ordered):
            member.ordered = ALONE
        return changed

    def busy(self, worker: str) -> None:
        """It was given work."""
        if worker in self._members:
            self._members[worker].waits = False

    def gone(self, workers: Iterable[str]) -> bool:
        """They died, or their node drains. Returns whether this changes who there is."""
        changed = False
        for worker in workers:
            self._missing.pop(worker, None)
            member = self._members.get(worker)
            if member is not None and member.live:
                self._forget(worker, member)
                member.live = member.waits = False
                changed = True
        return changed

    def settled(self, now_ms: int) -> bool:
        """Give up waiting for who is overdue. Returns whether that frees somebody to go on."""
        overdue = [worker for worker, until_ms in self._missing.items() if until_ms <= now_ms]
        for worker in overdue:
            del self._missing[worker]
        return bool(overdue)

    # --- what is wanted

    def plan(self, planner: Planner) -> None:
        """Want other groups from now on."""
        live = sorted((worker for worker, member in self._members.items() if member.live), key=_by_place)
        groups = planner(live, [WorkerGroup(members=formed.members) for formed in self._formed.values()])
        self._wanted = {worker: group.members for group in groups for worker in group.members}
        for epoch, formed in list(self._formed.items()):
            if any(self._wanted.get(worker) != formed.members for worker in formed.members):
                del self._formed[epoch]

    def groups(self) -> list[Formed]:
        """That exist, as far as is known; who works alone is in none."""
        return [formed for _, formed in sorted(self._formed.items())]

    def wanted(self) -> dict[str, tuple[str, ...]]:
        """By live worker: the members of the group that it should be in."""
        return dict(self._wanted)

    def nodes(self) -> set[str]:
        """With somebody who lives."""
        return {node_of(worker) for worker, member in self._members.items() if member.live}

    def workers_of(self, node: str) -> list[str]:
        """Whom it has heard of."""
        return [worker for worker in self._members if node_of(worker) == node]

    def layouts(self) -> dict[str, tuple[tuple[str, ...], ...]]:
        """The groups of each node, who works alone as a group of one; of nodes where all are as they should be."""
        found: dict[str, set[tuple[str, ...]]] = {}
        unsettled = {node_of(worker) for worker in self._missing}
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
        """The members of the group that it is in, as far as is known: who follows calls in only when it is idle."""
        formed = self._formed.get(member.epoch) or self._formed.get(member.ordered)
        if formed is None or self._members[formed.members[0]].epoch != formed.epoch:
            return (worker,)
        return formed.members

    def leads(self, worker: str) -> bool:
        """Whether it may be given work: alone, and meant to be, or the first of its group, as that is formed."""
        member = self._members.get(worker)
        if member is None or not member.live:
            return True  # not one that groups are made of
        if member.epoch == ALONE:
            alone = member.ordered == ALONE and len(self._wanted.get(worker, (worker,))) == 1
            return alone and not self._is_settling(worker)
        formed = self._formed.get(member.epoch)
        return formed is not None and formed.members[0] == worker

    def must_come(self, worker: str) -> bool:
        """Whether one that is at work should hand it back and pull: it is wanted elsewhere."""
        member = self._members.get(worker)
        if member is None or not member.live:
            return False
        here = self._here(worker, member)
        return here != self._wanted.get(worker, here) or (member.epoch != ALONE and member.epoch not in self._formed)

    # --- what is ordered

    def order(self, worker: str) -> Regroup | None:
        """What one that pulls must do first; None: nothing, or wait for the others (`leads` tells which)."""
        member = self._members.get(worker)
        if member is None or not member.live:
            return None
        if member.epoch != ALONE and member.epoch not in self._formed:
            member.ordered = ALONE
            return replace(alone(worker), keep=self._kept(worker, member))
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
            keep=self._kept(worker, member),
        )

    def _kept(self, worker: str, member: "_Member") -> tuple[int, ...]:
        """The communicators of a process that are not known to be broken."""
        process = (worker, member.boot)
        return tuple(sorted(number for known, number in self._communicators.items() if process in known))

    def _form(self, wanted: tuple[str, ...]) -> None:
        """Order a group into being if all of it is at the table."""
        members = [self._members.get(worker) for worker in wanted]
        ready = [m for m in members if m and m.live and m.waits and m.epoch == m.ordered == ALONE]
        if len(wanted) < 2 or len(ready) < len(wanted) or self._is_settling(wanted[0]):
            return
        epoch = self._number()
        before = self._next
        communicators = [(self._communicator(some), some) for some in (*_aligned_in(wanted), wanted)]
        prepare = tuple((number, some) for number, some in communicators[:-1] if number >= before)
        self._formed[epoch] = Formed(epoch=epoch, communicator=communicators[-1][0], members=wanted, prepare=prepare)
        for member in ready:
            member.ordered = epoch

    def _communicator(self, workers: tuple[str, ...]) -> int:
        """The number of what these processes share; a new one if they share none."""
        processes = tuple((worker, self._members[worker].boot) for worker in workers)
        if processes not in self._communicators:
            self._communicators[processes] = self._number()
        return self._communicators[processes]

    def _number(self) -> int:
        self._next += 1
        return self._next - 1

    # --- what is no more

    def _tore(self, number: int, worker: str, now_ms: int) -> bool:
        """A communicator broke: it is never used again, and who was in that group is gone until he calls in."""
        for processes in [known for known, one in self._communicators.items() if one == number]:
            del self._communicators[processes]
        torn = [formed for formed in self._formed.values() if formed.communicator == number]
        for formed in torn:
            del self._formed[formed.epoch]
            for other in formed.members:
                member = self._members[other]
                if other != worker and member.live and (member.epoch, member.ordered) != (ALONE, ALONE):
                    member.live = member.waits = False
                    self._missing[other] = now_ms + self._settling_ms
        return bool(torn)

    def _is_settling(self, worker: str) -> bool:
        """Whether a peer on its node is still waited for."""
        return any(node_of(other) == node_of(worker) for other in self._missing)

    def _has_left(self, worker: str, epoch: int) -> bool:
        """Whether a worker that says it is alone has left an epoch, rather than not heard of it yet."""
        formed = self._formed.get(epoch)
        return formed is None or worker not in formed.members

    def _forget(self, worker: str, member: _Member) -> None:
        """This process is no more: neither are its groups, nor any communicator it was in."""
        process = (worker, member.boot)
        for processes in [known for known in self._communicators if process in known]:
            del self._communicators[processes]
        for epoch, formed in list(self._formed.items()):
            if worker in formed.members:
                del self._formed[epoch]


def _aligned_in(members: tuple[str, ...]) -> list[tuple[str, ...]]:
    """Smaller groups that may follow this one, when somebody of it dies or more is to be done: the aligned ones."""
    places = {_by_place(worker)[1]: worker for worker in members}
    degrees = [degree for degree in (2, 4, 8) if degree < len(members)]
    subsets = aligned_subsets(max(places) + 1, degrees)
    return [tuple(places[place] for place in some) for some in subsets if places.keys() >= set(some)]


def _by_place(worker: str) -> tuple[str, int]:
    node, _, place = worker.rpartition("/")
    return node, int(place)
