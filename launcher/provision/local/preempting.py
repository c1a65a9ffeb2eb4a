"""The local cloud's preemption of a spot node: first the notice, then the end. preemptions.py holds the schedule.

A preemption at a fixed iteration is first written into the folder of its node, so that it happens once, whoever looks.
"""

import re
import signal
from collections.abc import Callable, Sequence

from launcher.decide.node_facts import NodeFact
from launcher.money import duration
from launcher.provision.local import processes
from launcher.provision.local.node_end import end_node
from launcher.provision.local.node_records import NodeRecords
from launcher.provision.local.preemptions import Manner, PreemptionSchedule, ScheduledPreemption

SILENCE_MS = 30_000
"""Delay until the local cloud reports a silently stopped node as gone (ms, run's clock)."""


ORDERED = "preempted_at.json"
"""File of a node that is preempted at a fixed iteration: number of the plan, slot and time."""

NAME = re.compile(r"-((?:trainer|spot)(?:-\d+)?)-g\d+$")
"""End of a node's name: the slot that it was bought for, and its number there."""


def order_planned(schedule: PreemptionSchedule, nodes: Sequence[NodeRecords], iterations: Callable[[], int]) -> bool:
    """Order the planned preemptions that are due. Return whether any is left for later.

    `iterations`: returns the number of finished iterations; called only while a preemption is left.
    """
    orders = (node.read(ORDERED) for node in nodes)
    ordered = {order["plan"] for order in orders if order is not None}
    left = [(number, plan) for number, plan in enumerate(schedule.planned) if number not in ordered]
    if not left:
        return False
    finished = iterations()
    for number, plan in left:
        if plan.iteration > finished:
            continue
        held = {slot: _node_in(slot, nodes) for slot in plan.slots}
        on_spot = {
            slot: node
            for slot, node in held.items()
            if node is None or (node.requested() or {}).get("ordinal") is not None
        }
        if any(node is None or node.read("ready.json") is None for node in on_spot.values()):
            continue
        for slot, node in on_spot.items():
            if node is not None:
                node.write(ORDERED, {"plan": number, "slot": slot, "at_ms": node.clock.now_ms()})
    return True


def planned_for(node: NodeRecords, schedule: PreemptionSchedule, fact: NodeFact) -> ScheduledPreemption | None:
    """Return the preemption of a ready spot node: as ordered, else by the trace. None: it is not preempted."""
    order, request = node.read(ORDERED), node.requested()
    if order is None:
        ordinal = None if request is None else request.get("ordinal")
        return None if ordinal is None else schedule.preemption(ordinal)
    plan = schedule.planned[order["plan"]]
    ahead_ms = schedule.notice_ms if plan.notice else 0
    return ScheduledPreemption(
        lifetime_ms=int(order["at_ms"]) - (fact.ready_ms or 0) + ahead_ms,
        notice_ms=schedule.notice_ms,
        manner=Manner(with_notice=plan.notice, signal=plan.signal),
    )


def _node_in(slot: str, nodes: Sequence[NodeRecords]) -> NodeRecords | None:
    """Return the newest node of a slot that has not ended and is not being preempted; None if there is none.

    A node's name has the slot that it was bought for; one that took the role of the trainer has the trainer's now.
    """
    newest: tuple[int, NodeRecords] | None = None
    for node in nodes:
        spec, bought_for = node.read("node.json"), NAME.search(node.folder.name)
        if (
            spec is None
            or bought_for is None
            or any(node.read(name) for name in ("ended.json", "reclaim.json", ORDERED))
        ):
            continue
        now, generation = "trainer" if spec["role"] == "trainer" else bought_for[1], int(spec.get("generation", 0))
        if now == slot and (newest is None or generation >= newest[0]):
            newest = generation, node
    return None if newest is None else newest[1]


def preempt_when_due(node: NodeRecords, planned: ScheduledPreemption, fact: NodeFact) -> NodeFact:
    """Preempt the node when due: first the notice, then the end. `fact`: the running node."""
    assert fact.ready_ms is not None
    now_ms, manner = node.clock.now_ms(), planned.manner
    end_ms = fact.ready_ms + planned.lifetime_ms
    if manner.with_notice:
        if fact.notice_deadline_ms is None and now_ms >= end_ms - planned.notice_ms:
            # While no controller ran, no notice was written. A late notice still gives the node the whole notice
            # period.
            node.write("notice.json", {"deadline_ms": max(end_ms, now_ms + planned.notice_ms)})
            return node.fact_of_running(node.requested() or {})
        end_ms = fact.notice_deadline_ms or end_ms + planned.notice_ms
    if now_ms < end_ms:
        return fact
    preemption = node.read("reclaim.json")
    if preemption is None:
        preemption = {"at_ms": now_ms}
        node.write("reclaim.json", preemption)
    if manner.signal == "SIGSTOP" and now_ms < int(preemption["at_ms"]) + SILENCE_MS:
        running = processes.processes_of(node.folder, node.read("agent.json"))
        processes.send([pid for pid in running if not processes.is_stopped(pid)], signal.SIGSTOP)
        return fact  # a silent stop: the loss is not reported yet
    notice = f"{duration(planned.notice_ms)} notice" if manner.with_notice else "no notice"
    evidence = (
        f"preempted by the local cloud {duration(max(1, int(preemption['at_ms']) - fact.ready_ms))} after it was "
        f"ready: {manner.signal}, {notice}"
    )
    ended = end_node(
        node,
        evidence,
        int(preemption["at_ms"]),
        reclaimed=True,
        signal=manner.signal,
        with_notice=manner.with_notice,
    )
    return ended or fact
