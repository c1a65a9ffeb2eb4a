"""The coordinator's part in sequence parallelism: who should share with whom, as nodes, work and step times change.

heard (who calls in, who is gone, what waits, how long steps take) -> plan -> orders, to one worker at a time

Groups are planned anew when somebody comes or goes, and with `sp_degree: auto` also as demand changes, every
`PLAN_SECONDS`. The plan starts from what workers believe of their model (engine/parallel/latency.py) and goes over to
what their steps were measured to take. Nothing is remembered over a restart: who calls in says which group he is in.

Pure: no clock, no I/O. The caller says what time it is, and who takes part.
"""

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import median
from typing import Any, Literal

from engine.events import ProgressEvent, Regrouped
from engine.parallel.forecast import Demand
from engine.parallel.groups import WorkerGroup, plan_groups
from engine.parallel.latency import LAST, with_measured
from engine.parallel.membership import SETTLING_SECONDS, Membership, node_of

PLAN_SECONDS = 0.5
"""Wall time between two plans that nobody's coming or going asked for. A plan for 1,000 nodes takes a tenth of it."""

REGROUP_SECONDS = 0.02
"""From ending one's group to working in the next: what a regroup takes beyond an ordinary step (sp_regroup's page)."""


class Regrouping:
    """See the module's story. One for all nodes."""

    def __init__(
        self,
        demand: Callable[[], Demand],
        *,
        sp_degree: int | Literal["auto"],
        run_ms: Callable[[float], int],
        first: int = 1,
    ) -> None:
        """`run_ms`: of so many seconds of wall time. `first`: epochs and communicators count from here: above any that
        an earlier coordinator gave."""
        self.members = Membership(settling_ms=run_ms(SETTLING_SECONDS), first=first)
        self.events: list[ProgressEvent] = []
        """What the launcher should hear of; the caller takes them away."""
        self._demand, self._sp_degree, self._plan_ms = demand, sp_degree, run_ms(PLAN_SECONDS)
        self._believed: dict[int, float] = {}
        """Seconds of a denoising step of one picture, by every degree that the model allows."""
        self._seen: dict[str, dict[int, deque[float]]] = defaultdict(lambda: defaultdict(lambda: deque(maxlen=LAST)))
        """Seconds of steps, by request class and degree."""
        self._planned_ms = 0
        self._why: dict[str, str] = {}
        """Why a node's groups are being changed."""
        self._told: dict[str, tuple[tuple[str, ...], ...]] = {}
        """By node: the groups that the launcher was last told of."""

    # --- what is heard ----------------------------------------------------------------------------------

    def pulled(self, worker: str, boot: int, group: Mapping[str, Any], *, now_ms: int) -> bool:
        """A worker that shares has nothing to do and asks; `group` is its `Elastic.report`. True: plans changed."""
        self._believed = {int(degree): seconds for degree, seconds in group["believed"].items()}
        why = f"{worker} lost a peer" if group["torn"] else f"{worker} came"
        changed = self.members.pulled(worker, boot, group["epoch"], group["torn"], now_ms=now_ms)
        return changed and self._plan(why, [worker], now_ms)

    def gone(self, workers: Iterable[str], why: str, *, now_ms: int) -> bool:
        """They died, or their node is lost or drains. True: plans changed."""
        workers = list(workers)
        return self.members.gone(workers) and self._plan(why, workers, now_ms)

    def measured(self, request_class: str, degree: int, step_seconds: float) -> None:
        """The steps of a lease of this class took so long each, shared by so many workers."""
        if step_seconds > 0:
            self._seen[request_class][degree].append(step_seconds)

    def tick(self, takes_part: Callable[[str], bool], *, now_ms: int) -> bool:
        """Call often. `takes_part`: whether a node is neither lost nor draining. True: plans changed."""
        changed = False
        for node in self.members.nodes():
            if not takes_part(node):
                changed |= self.gone(self.members.workers_of(node), f"{node} is taken back", now_ms=now_ms)
        if self.members.settled(now_ms):
            self._plan("a lost peer did not call in", [], now_ms)
            changed = True  # whoever waited for it may go on, whatever the plan
        if self._sp_degree == "auto" and now_ms - self._planned_ms >= self._plan_ms:
            changed |= self._plan("demand", [], now_ms)
        self._tell()
        return changed

    # --- what is wanted ---------------------------------------------------------------------------------

    def _plan(self, why: str, workers: Iterable[str], now_ms: int) -> bool:
        """Returns whether other groups are wanted now. Of nodes that are not named only demand changes groups."""
        self._planned_ms = now_ms
        if not self._believed:
            return False
        before = self.members.wanted()
        if self._sp_degree == "auto":
            self.members.plan(self._by_demand)
        else:
            self.members.plan(self._by_degree)
        named = {node_of(worker) for worker in workers}
        changed = {node_of(worker) for worker, group in self.members.wanted().items() if before.get(worker) != group}
        self._why |= dict.fromkeys(changed, "demand") | dict.fromkeys(named, why)
        return bool(changed or named)

    def _by_degree(self, live: Sequence[str], groups: Sequence[WorkerGroup]) -> Sequence[WorkerGroup]:
        assert self._sp_degree != "auto"
        # A degree that the model does not allow is refused before anything is bought.
        degree = max((one for one in self._believed if one <= self._sp_degree), default=1)
        believed = {"any": self._believed | {1: self._believed.get(1, 1.0)}}
        return plan_groups(live, step_seconds=believed, regroup_seconds=0.0, groups=groups, sp_degree=degree)

    def _by_demand(self, live: Sequence[str], groups: Sequence[WorkerGroup]) -> Sequence[WorkerGroup]:
        demand, workers = self._demand(), set(live)
        return plan_groups(
            live,
            step_seconds=self._step_seconds(demand.pictures),
            regroup_seconds=REGROUP_SECONDS,
            groups=groups,
            in_flight={worker: one for worker, one in demand.in_flight.items() if worker in workers},
            waiting=demand.waiting,
        )

    def _step_seconds(self, pictures: Mapping[str, int]) -> dict[str, dict[int, float]]:
        """By request class and degree. A class of which no step was seen is believed to be as far off as the others."""
        believed = {
            # Powers of two: the planner's aligned groups, whose communicators exist beforehand, have no other degrees.
            name: {degree: seconds * many for degree, seconds in self._believed.items() if degree.bit_count() == 1}
            for name, many in pictures.items()
        }
        table = {name: with_measured(times, self._steps_of(name)) for name, times in believed.items()}
        off = [table[name][d] / believed[name][d] for name in table for d in self._steps_of(name) if d in table[name]]
        scale = median(off) if off else 1.0
        return {
            name: times if self._steps_of(name) else {degree: seconds * scale for degree, seconds in times.items()}
            for name, times in table.items()
        }

    def _steps_of(self, request_class: str) -> dict[int, list[float]]:
        return {degree: list(steps) for degree, steps in self._seen.get(request_class, {}).items()}

    # --- what is told -----------------------------------------------------------------------------------

    def _tell(self) -> None:
        """Of nodes whose workers are in the groups that are wanted, if those are others than were told."""
        for node, groups in self.members.layouts().items():
            shares = any(len(group) > 1 for group in groups)
            if groups != self._told.get(node) and (shares or node in self._told):
                self._told[node] = groups
                self.events.append(Regrouped(node=node, groups=groups, reason=self._why.get(node, "")))
