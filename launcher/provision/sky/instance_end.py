"""The end of a VM, from the cloud's own record. The bill of a node ends here and nowhere else.

the cloud says when the VM ended           -> that time
the cloud has forgotten, or names no time  -> the last sign of life: the cloud listed the VM, or its agent answered;
                                              after a preemption the announced time, if that is later
no sign of life is known either            -> now

An order to terminate is no end. The cloud may refuse the order, ignore it or lose it, and the VM costs money meanwhile.
The time of the last sign of life is in `seen.json`, so another process can continue after a crash.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from launcher.clouds.base import Instance, InstanceState
from launcher.provision.sky.cloud_node import CloudNode
from launcher.provision.sky.records import ExitRecord, NoticeRecord, SeenRecord
from launcher.provision.sky.surroundings import Surroundings

SEEN_MS = 60_000
"""Time between two writes of the last sign of life (ms). After a crash, at most this time is missing from the bill of a
VM whose end the cloud has forgotten. Both clouds bill a minute at least."""


def stopped_ms(instance: Instance) -> int | None:
    """Return the time at which the cloud stopped billing the VM. None: the VM is billed, or the cloud names no time.

    A time before the VM's start belongs to an earlier stop.
    """
    if instance.state in (InstanceState.PENDING, InstanceState.RUNNING) or instance.ended_ms is None:
        return None
    return instance.ended_ms if instance.ended_ms >= (instance.launched_ms or 0) else None


def is_billed(instance: Instance) -> bool:
    """Return whether the cloud bills the VM now. A stopping VM is billed until the cloud says when it stopped."""
    return instance.state is not InstanceState.GONE and stopped_ms(instance) is None


@dataclass(frozen=True, slots=True)
class InstanceEnds:
    """Remembers the last sign of life of each VM, and asks the cloud for the end. `end_of` blocks."""

    around: Surroundings

    def saw_alive(self, node: CloudNode, at_ms: int) -> None:
        """Remember that the node's VM was alive at a time: the cloud listed it as billed, or its agent answered."""
        sightings = node.sightings
        sightings.alive_ms = max(at_ms, sightings.alive_ms or at_ms)
        if sightings.alive_ms - sightings.written_ms >= SEEN_MS:
            node.files.write(SeenRecord(at_ms=sightings.alive_ms))
            sightings.written_ms = sightings.alive_ms

    def end_of(self, node: CloudNode, instance: Instance) -> Instance:
        """Ask the cloud for the end of a VM that its list does not show alive.

        The answer has the time of the end, and a state that is not GONE if the cloud finds the VM alive.
        """
        end = self.around.clouds[instance.cloud].end_of(instance)
        return end if is_billed(end) else replace(end, ended_ms=self._end_ms(node, end))

    def without_instance_ms(self, node: CloudNode) -> int:
        """Return the end of a node of which the cloud knows no VM."""
        alive_ms = self._last_alive_ms(node)
        return self.around.clock.now_ms() if alive_ms is None else alive_ms

    def _end_ms(self, node: CloudNode, end: Instance) -> int:
        now_ms, ended_ms = self.around.clock.now_ms(), stopped_ms(end)
        if ended_ms is None:
            # EC2 names no time for a preemption, and the VM ran until the announced one, whoever could see it.
            notice = node.files.read(NoticeRecord) if end.reclaimed else None
            signs = (self._last_alive_ms(node), None if notice is None else notice.deadline_ms)
            ended_ms = max((sign for sign in signs if sign is not None), default=None)
        return now_ms if ended_ms is None else min(max(ended_ms, end.launched_ms or 0), now_ms)

    def _last_alive_ms(self, node: CloudNode) -> int | None:
        """Return the time of the last sign of life. The node's own clock may be fast, so the time is at most now."""
        sighting, exited = node.files.read(SeenRecord), node.files.read(ExitRecord)
        signs: Sequence[int | None] = (
            node.sightings.alive_ms,
            None if sighting is None else sighting.at_ms,
            None if exited is None else exited.at_ms,
        )
        newest_ms = max((sign for sign in signs if sign is not None), default=None)
        return None if newest_ms is None else min(newest_ms, self.around.clock.now_ms())
