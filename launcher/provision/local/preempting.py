"""The local cloud's preemption of a spot node: first the notice, then the end. preemptions.py holds the schedule."""

import signal

from launcher.decide.node_facts import NodeFact
from launcher.money import duration
from launcher.provision.local import processes
from launcher.provision.local.node_end import end_node
from launcher.provision.local.node_records import NodeRecords
from launcher.provision.local.preemptions import ScheduledPreemption

SILENCE_MS = 30_000
"""Delay until the local cloud reports a silently stopped node as gone (ms, run's clock)."""


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
