"""The end of a local node: found by looking at the node's records and processes, or caused by killing the processes."""

import contextlib
import signal
import time
from typing import Any

from engine.mark import ENDING, read_exits
from launcher.decide.node_facts import NodeFact
from launcher.provision.local import processes
from launcher.provision.local.node_records import NodeRecords

AGENT_SECONDS = 60.0
"""Longest time until a process becomes an agent (wall time). After longer its imports have failed or hang."""

READY_SECONDS = 600.0
"""Longest time until workers call in (wall time). Loading a large model takes minutes."""

STOPPED_SECONDS = 5.0
"""Time after which an unexpectedly stopped node (SIGSTOP) counts as lost (wall time)."""

ASSIGNED = "assigned.json"
"""File of a node whose processes are being ended and started again for another role."""

FORMER = "former.json"
"""The processes that were the node's agents before it got another role: {"agents"}. Their exits say nothing now."""

REAP_SECONDS = 2.0
"""Longest wait for the exit code of an agent that just died. A busy computer may start no process for a second."""


def end_node(node: NodeRecords, evidence: str, ended_ms: int, **how: Any) -> NodeFact | None:
    """Kill the node's processes, then record the end. None: a process still runs, and the next pass tries again."""
    agent = node.read("agent.json")
    with contextlib.suppress(OSError):  # a full disk must not keep a node alive
        (node.folder / ENDING).touch(mode=0o600)
    if processes.kill_all(node.folder, agent):
        return None
    request = node.requested()
    started_ms = int(request["requested_ms"]) if request and agent else None
    notice = node.read("notice.json")
    record = {
        "evidence": evidence,
        "started_ms": started_ms,
        "ended_ms": max(ended_ms, started_ms or 0),
        "ready_ms": (node.read("ready.json") or {}).get("at_ms"),
        "notice_deadline_ms": notice["deadline_ms"] if notice else None,
        **how,
    }
    node.write("ended.json", record)
    return node.fact_of_ended()


def find_end(node: NodeRecords, *, are_nodes_preempted: bool) -> NodeFact | None:
    """Return the node's end, recorded or found now. None: the node runs, or is starting.

    `are_nodes_preempted`: a preemption that has begun will be completed, so its node has no end of its own.
    """
    ended = node.fact_of_ended()
    if ended is not None:
        return ended
    request, agent = node.requested(), node.read("agent.json")
    if request is None:
        return None
    now_ms = node.clock.now_ms()
    assigned = node.read(ASSIGNED)
    if assigned is not None and node.seconds_since(assigned) <= AGENT_SECONDS:
        return None
    spawned = node.read("spawned.json")
    waited = node.seconds_since(spawned or request)
    if agent is None:
        former = (node.read(FORMER) or {"agents": []})["agents"]
        exits = {pid: code for pid, code in read_exits(node.folder).items() if pid not in former}
        is_coming = not exits and (spawned is None or processes.is_recorded_alive(spawned))
        if is_coming or processes.processes_of(node.folder):
            if waited <= AGENT_SECONDS:
                return None
            return end_node(node, f"no agent appeared within {AGENT_SECONDS:.0f} s", now_ms)
        # The process may have written agent.json between the read above and its end. Its files are final now.
        agent = node.read("agent.json")
        if agent is None:
            last = next(reversed(exits), None)
            return end_node(node, _exit_evidence(node, last) + " before it was an agent", now_ms)
    if not processes.is_recorded_alive(agent):
        if are_nodes_preempted and node.is_being_preempted(request):
            return None
        return end_node(node, _exit_evidence(node, agent["pid"]), _last_moment(node, now_ms))
    if node.read("ready.json") is None and waited > READY_SECONDS:
        return end_node(node, f"its workers did not call in within {READY_SECONDS:.0f} s", now_ms)
    if are_nodes_preempted and node.is_being_preempted(request):
        return None
    return _end_of_stopped(node, int(agent["pid"]), now_ms)


def _end_of_stopped(node: NodeRecords, pid: int, now_ms: int) -> NodeFact | None:
    """Return the end of a node that stopped without an order and stayed stopped, else None."""
    if not processes.is_stopped(pid):
        (node.folder / "stopped.json").unlink(missing_ok=True)
        return None
    since = node.read("stopped.json")
    if since is None:
        node.write("stopped.json", {"boot_ms": node.boot()})
        return None
    if node.seconds_since(since) < STOPPED_SECONDS:
        return None
    return end_node(node, "it stood still (SIGSTOP) and did not come back", now_ms, signal="SIGSTOP")


def _last_moment(node: NodeRecords, now_ms: int) -> int:
    """Return the end time of a dead agent: its own report, else now, but never after its spend deadline."""
    recorded = node.read("exit.json")
    if recorded is not None:
        return int(recorded["at_ms"])
    deadline = (node.read("money.json") or {}).get("deadline_ms")
    deadline = deadline or (node.read("node.json") or {}).get("money_deadline_ms")
    return now_ms if deadline is None else min(now_ms, int(deadline))


def _exit_evidence(node: NodeRecords, pid: int | None) -> str:
    """Describe the end of the agent with this pid. Call only after the agent was seen dead.

    The exit code is read here, after the death was seen. Read earlier, a process could die between the two reads
    and seem to have no exit code. Only the starter learns the code, so a restarted controller knows the code only
    if the agent wrote exit.json. A second agent of the node, which found the lock taken, has a different pid.
    """
    until = time.monotonic() + REAP_SECONDS
    while True:
        is_unread = pid is not None and processes.is_zombie(pid) and time.monotonic() < until
        # The starter writes the code before the zombie is gone, so the code is read after the zombie was looked for.
        code = read_exits(node.folder).get(pid or 0)
        if code is not None or not is_unread:
            break
        time.sleep(0.005)
    report = node.read("exit.json")
    if report is not None:
        code = int(report["code"])
    if code is None:
        return "its agent is gone"
    if code < 0:
        return f"its agent was killed by {signal.Signals(-code).name}"
    text = str((report or {}).get("text", ""))
    return f"its agent exited with code {code}" + (f": {text}" if text else "")
