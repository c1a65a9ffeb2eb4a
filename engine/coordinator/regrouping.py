"""The coordinator's planning of sequence parallelism as nodes, work and step times change.

inputs (pulls, losses, demand, measured step times) -> plan -> orders, to one worker at a time

Groups are planned anew when a worker comes or goes. With `sp_degree: auto`, groups are also planned on demand changes,
every `PLAN_SECONDS`. The plan starts from the workers' modelled step times (engine/parallel/latency.py) and moves to
measured step times. Nothing is kept across a coordinator restart: each worker's pull names its current group.

Pure: no clock, no I/O. The caller passes in the time and the nodes that take part.
"""

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import median
from typing import Literal

from engine.coordinator.membership import Membership
from engine.coordinator.settling import SETTLING_SECONDS
from engine.events import ProgressEvent, Regrouped
from engine.parallel.forecast import Demand
from engine.parallel.groups import plan_groups
from engine.parallel.latency import LAST, with_measured
from engine.parallel.worker_group import WorkerGroup, node_of
from engine.protocol.messages import GroupReport

PLAN_SECONDS = 0.5
"""Wall time between two plans without a change of workers. A plan for 1,000 nodes takes a tenth of `PLAN_SECONDS`."""

REGROUP_SECONDS = 0.02
"""Seconds from the end of the old group to work in the new group, beyond an ordinary step. Measured:
tests/benchmarks/results/sp_regroup.md."""


class Regrouping:
    """The SP planning of all nodes. See the module docstring."""

    def __init__(
        self,
        demand: Callable[[], Demand],
        *,
        sp_degree: int | Literal["auto"],
        run_ms: Callable[[float], int],
        first: int = 1,
    ) -> None:
        """Start without workers.

        `run_ms`: converts seconds of wall time to milliseconds of the run's clock. `first`: first number for epochs and
        communicators, above every number issued by an earlier coordinator.
        """
        self.members = Membership(settling_ms=run_ms(SETTLING_SECONDS), first=first)
        self.events: list[ProgressEvent] = []
        """Events for the launcher. The caller removes them after reading."""
        self._demand, self._sp_degree, self._plan_ms = demand, sp_degree, run_ms(PLAN_SECONDS)
        self._modelled: dict[int, float] = {}
        """Modelled seconds of a denoising step of an image, by every degree allowed for the model."""
        self._measured: dict[str, dict[int, deque[float]]] = defaultdict(
            lambda: defaultdict(lambda: deque(maxlen=LAST))
        )
        """Measured seconds of steps, by request class and degree."""
        self._planned_ms = 0
        self._why: dict[str, str] = {}
        """The reason for the current change of a node's groups."""
        self._last_sent: dict[str, tuple[tuple[str, ...], ...]] = {}
        """By node: the groups last reported to the launcher."""

    # --- inputs -----------------------------------------------------------------------------------------

    def pulled(self, worker: str, boot: int, group: GroupReport, *, now_ms: int) -> bool:
        """Record the pull of an idle worker. Return True if the plan changed."""
        self._modelled = dict(group.believed)
        why = f"{worker} lost a peer" if group.torn else f"{worker} came"
        changed = self.members.pulled(worker, boot, group.epoch, group.torn, now_ms=now_ms)
        return changed and self._plan(why, [worker], now_ms)

    def gone(self, workers: Iterable[str], why: str, *, now_ms: int) -> bool:
        """Record workers as dead, or their node as lost or draining. Return True if the plan changed."""
        workers = list(workers)
        return self.members.gone(workers) and self._plan(why, workers, now_ms)

    def measured(self, request_class: str, degree: int, step_seconds: float) -> None:
        """Record the step time of a lease of this class at this degree."""
        if step_seconds > 0:
            self._measured[request_class][degree].append(step_seconds)

    def tick(self, takes_part: Callable[[str], bool], *, now_ms: int) -> bool:
        """Handle lost nodes, overdue peers and the regular plan. Call often. Return True if the plan changed.

        `takes_part`: returns True if a node is neither lost nor draining.
        """
        changed = False
        for node in self.members.table.nodes():
            if not takes_part(node):
                changed |= self.gone(self.members.table.workers_of(node), f"{node} drains or is lost", now_ms=now_ms)
        if self.members.settled(now_ms):
            self._plan("a lost peer did not call in", [], now_ms)
            changed = True  # a worker that waited for the peer may go on, whatever the plan
        if self._sp_degree == "auto" and now_ms - self._planned_ms >= self._plan_ms:
            changed |= self._plan("demand", [], now_ms)
        self._report_groups()
        return changed

    # --- planning ---------------------------------------------------------------------------------------

    def _plan(self, why: str, workers: Iterable[str], now_ms: int) -> bool:
        """Plan and return True if the wanted groups changed.

        `why`: the reason for changes on the nodes of `workers`. On all other nodes, the reason for a change is the
        demand.
        """
        self._planned_ms = now_ms
        if not self._modelled:
            return False
        before = self.members.table.wanted
        if self._sp_degree == "auto":
            self.members.plan(self._by_demand)
        else:
            self.members.plan(self._by_degree)
        named = {node_of(worker) for worker in workers}
        changed = {
            node_of(worker) for worker, group in self.members.table.wanted.items() if before.get(worker) != group
        }
        self._why |= dict.fromkeys(changed, "demand") | dict.fromkeys(named, why)
        return bool(changed or named)

    def _by_degree(self, live: Sequence[str], groups: Sequence[WorkerGroup]) -> Sequence[WorkerGroup]:
        assert self._sp_degree != "auto"
        # A degree not allowed for the model is refused before anything is bought.
        degree = max((modelled for modelled in self._modelled if modelled <= self._sp_degree), default=1)
        believed = {"any": self._modelled | {1: self._modelled.get(1, 1.0)}}
        return plan_groups(live, step_seconds=believed, regroup_seconds=0.0, groups=groups, sp_degree=degree)

    def _by_demand(self, live: Sequence[str], groups: Sequence[WorkerGroup]) -> Sequence[WorkerGroup]:
        demand, workers = self._demand(), set(live)
        return plan_groups(
            live,
            step_seconds=self._step_seconds(demand.images),
            regroup_seconds=REGROUP_SECONDS,
            groups=groups,
            in_flight={worker: work for worker, work in demand.in_flight.items() if worker in workers},
            waiting=demand.waiting,
        )

    def _step_seconds(self, images: Mapping[str, int]) -> dict[str, dict[int, float]]:
        """Return the seconds of a step by request class and degree. `images`: images per lease, by class.

        The modelled times of an unmeasured class are scaled by the median ratio of measured to modelled times.
        """
        believed = {
            # Powers of two only: the planner's aligned groups, whose communicators exist beforehand, have only these.
            name: {degree: seconds * many for degree, seconds in self._modelled.items() if degree.bit_count() == 1}
            for name, many in images.items()
        }
        table = {name: with_measured(times, self._steps_of(name)) for name, times in believed.items()}
        off = [table[name][d] / believed[name][d] for name in table for d in self._steps_of(name) if d in table[name]]
        scale = median(off) if off else 1.0
        return {
            name: times if self._steps_of(name) else {degree: seconds * scale for degree, seconds in times.items()}
            for name, times in table.items()
        }

    def _steps_of(self, request_class: str) -> dict[int, list[float]]:
        return {degree: list(steps) for degree, steps in self._measured.get(request_class, {}).items()}

    # --- reports to the launcher ------------------------------------------------------------------------

    def _report_groups(self) -> None:
        """Report a node's new groups to the launcher once all its workers are in their wanted groups."""
        for node, groups in self.members.layouts().items():
            shares = any(len(group) > 1 for group in groups)
            if groups != self._last_sent.get(node) and (shares or node in self._last_sent):
                self._last_sent[node] = groups
                self.events.append(Regrouped(node=node, groups=groups, reason=self._why.get(node, "")))
