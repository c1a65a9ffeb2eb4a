"""The members and groups of the SP membership (membership.py): their values, and methods that read the values."""

from collections.abc import Iterable
from dataclasses import dataclass

from engine.parallel.worker_group import node_of
from engine.protocol.request import ALONE


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
class Member:
    """The state of one worker, as its calls report."""

    boot: int
    epoch: int = ALONE
    """The epoch reported by the worker."""
    ordered: int = ALONE
    """The epoch last sent to the worker."""
    waits: bool = False
    """True if the worker has pulled and has had no work since."""
    live: bool = True


class GroupTable:
    """Every known worker, its wanted group, and the groups ordered to form."""

    def __init__(self) -> None:
        self.members: dict[str, Member] = {}
        self.wanted: dict[str, tuple[str, ...]] = {}
        """By live worker: the members of the worker's wanted group."""
        self.formed: dict[int, Formed] = {}
        """By epoch: groups ordered to form and not yet ordered to leave."""

    def live(self, worker: str) -> Member | None:
        """Return a worker that calls in, or None: the worker is unknown or dead."""
        member = self.members.get(worker)
        return member if member is not None and member.live else None

    def dissolve(self, worker: str) -> None:
        """Remove the groups of a worker."""
        for epoch, formed in list(self.formed.items()):
            if worker in formed.members:
                del self.formed[epoch]

    def groups(self) -> list[Formed]:
        """Return the known existing groups. Workers outside every group are left out."""
        return [formed for _, formed in sorted(self.formed.items())]

    def nodes(self) -> set[str]:
        """Return the nodes with a live worker."""
        return {node_of(worker) for worker, member in self.members.items() if member.live}

    def workers_of(self, node: str) -> list[str]:
        """Return all known workers of a node."""
        return [worker for worker in self.members if node_of(worker) == node]

    def layouts(self, unsettled: Iterable[str]) -> dict[str, tuple[tuple[str, ...], ...]]:
        """Return the groups of each node; a worker outside every group counts as a group of its own.

        Nodes with a worker not yet in its wanted group are left out, and the `unsettled` nodes.
        """
        groups_of_node: dict[str, set[tuple[str, ...]]] = {}
        left_out = set(unsettled)
        for worker, member in self.members.items():
            if member.live:
                group = self.group_of(worker, member)
                groups_of_node.setdefault(node_of(worker), set()).add(group)
                if group != self.wanted.get(worker):
                    left_out.add(node_of(worker))
        return {
            node: tuple(sorted(groups, key=lambda group: by_place(group[0])))
            for node, groups in sorted(groups_of_node.items())
            if node not in left_out
        }

    def group_of(self, worker: str, member: Member) -> tuple[str, ...]:
        """Return the members of the worker's current group, or the worker alone if the group's first member has left.

        Other members call in only when idle. Until a worker has reported the ordered group, the last order counts.
        """
        formed = self.formed.get(member.epoch) or self.formed.get(member.ordered)
        if formed is None or self.members[formed.members[0]].epoch != formed.epoch:
            return (worker,)
        return formed.members


def by_place(worker: str) -> tuple[str, int]:
    """Return the sort key of a worker: its node, and its number on the node."""
    node, _, place = worker.rpartition("/")
    return node, int(place)
