"""The local infra: a node is a process session on this machine, and the node's folder is its disk.

RUN/nodes/NAME/  node.json (NodeSpec)  request.json  spawned.json  agent.json  ready.json  notice.json
                 money.json  reclaim.json  stopped.json  ending  exits.jsonl  ended.json  logs/  progress/

`LocalProvisioner` plays the cloud: it starts nodes, reports their state, and preempts spot nodes by a printed rule. All
state is in the folders, so any process may continue the work, and a crash between any two lines is repaired by the next
`request` or `observe`.
"""

import contextlib
import json
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from engine.clock import Clock
from engine.durable import write_durably
from engine.events import Market
from engine.mark import ENDING, read_exits
from engine.node_spec import NodeSpec
from launcher.decide.node_facts import NodeFact, NodeStatus
from launcher.money import duration
from launcher.placement.placement import Placement
from launcher.provision.local import processes
from launcher.provision.local.agent_starter import AGENT, AgentStarter
from launcher.provision.local.preemptions import Reclaim, ReclaimRule

AGENT_SECONDS = 60.0
"""Longest time until a process becomes an agent (wall time). After longer its imports have failed or hang."""

READY_SECONDS = 600.0
"""Longest time until workers call in (wall time). Loading a large model takes minutes."""

SILENCE_MS = 30_000
"""Delay until the local cloud reports a silently stopped node as gone (ms, run's clock)."""

STOPPED_SECONDS = 5.0
"""Time after which an unexpectedly stopped node (SIGSTOP) counts as lost (wall time)."""

REAP_SECONDS = 0.5
"""Longest wait for the exit code of an agent that just died."""


def nodes_folder(run_folder: Path) -> Path:
    return run_folder / "nodes"


def node_folder(run_folder: Path, name: str) -> Path:
    return nodes_folder(run_folder) / name


class LocalProvisioner:
    """Starts and stops nodes on this machine, without waiting."""

    def __init__(
        self,
        folder: Path,
        clock: Clock,
        reclaims: ReclaimRule | None,
        agent: str = AGENT,
    ) -> None:
        """Create the provisioner. `agent`: module or file of the agent program."""
        self._folder, self._clock, self._reclaims = folder, clock, reclaims
        self._starter = AgentStarter(folder / "starter.log", agent)

    # --- calls of the controller ---------------------------------------------------------------------

    def request(self, want: Placement, spec: NodeSpec) -> None:
        """Start the node's agent, unless the node was started or ended before. A repeated name is one node.

        A crash may leave an unrecorded process. Then the node gets a second agent, which finds the node's lock taken
        and exits.
        """
        folder = node_folder(self._folder, spec.node)
        if Path(spec.folder) != folder:
            raise ValueError(f"{spec.node} has its disk in {spec.folder}; this provisioner keeps it in {folder}")
        (folder / "logs").mkdir(parents=True, exist_ok=True, mode=0o700)
        if _read(folder / "ended.json") is not None:
            return
        if _read(folder / "node.json") is None:
            _write(folder / "node.json", json.loads(spec.model_dump_json()))
        if _read(folder / "request.json") is None:
            facts = {"requested_ms": self._clock.now_ms(), "zone": want.zone, "ordinal": self._ordinal(want.market)}
            _write(folder / "request.json", facts)
        if _read(folder / "agent.json") is None and not processes.processes_of(folder):
            self._spawn(folder)

    def observe(self) -> Sequence[NodeFact]:
        """Return the state of every node of this run. Also plays the cloud: due spot nodes are preempted here."""
        facts = [self._observe(folder) for folder in self._folders()]
        return [fact for fact in facts if fact is not None]

    def release(self, names: Sequence[str]) -> None:
        """SIGKILL every process of the nodes. A node without a request can no longer be requested afterwards."""
        for name in names:
            folder = node_folder(self._folder, name)
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            if self._requested(folder) is None:
                self._end(folder, "released before it was started", self._clock.now_ms())
            elif self._ended_by_itself(folder) is None:
                self._end(folder, "released", self._clock.now_ms())

    def rearm(self, name: str, money_deadline_ms: int) -> None:
        """Write the node's new spend deadline beside its node.json, which never changes."""
        folder = node_folder(self._folder, name)
        if folder.exists() and _read(folder / "ended.json") is None:
            _write(folder / "money.json", {"deadline_ms": money_deadline_ms})

    def door(self, name: str, port: int) -> tuple[str, int] | None:
        """Return localhost: every node is this machine."""
        return "127.0.0.1", port

    def tidy(self) -> bool:
        """Return True. Nodes leave nothing behind except their folders."""
        return True

    def close(self) -> None:
        """End the process that starts agents. The agents continue."""
        self._starter.close()

    # --- starting ---------------------------------------------------------------------------------

    def _spawn(self, folder: Path) -> None:
        """Have the agent started.

        `spawned.json` names the starter: while the starter lives, an agent may still appear.
        """
        starter = self._starter.start(folder / "node.json")
        _write(folder / "spawned.json", {**starter, "at_ms": self._clock.now_ms()})

    def _ordinal(self, market: Market) -> int | None:
        """Return a new spot node's ordinal in the order of purchase, which decides the node's lifetime."""
        if market is not Market.SPOT:
            return None
        requests = (_read(folder / "request.json") or {} for folder in self._folders())
        bought = [request["ordinal"] for request in requests if request.get("ordinal") is not None]
        return max(bought, default=-1) + 1

    def _folders(self) -> list[Path]:
        root = nodes_folder(self._folder)
        return sorted(path for path in root.iterdir() if path.is_dir()) if root.exists() else []

    # --- observing -----------------------------------------------------------------------------------

    def _observe(self, folder: Path) -> NodeFact | None:
        ended = self._ended_by_itself(folder)
        if ended is not None:
            return ended
        request = self._requested(folder)
        if request is None:
            return None  # an interrupted request; a repeated request completes the files
        fact = self._running(folder, request)
        ordinal = request.get("ordinal")
        if self._reclaims is None or ordinal is None or fact.ready_ms is None:
            return fact
        return self._carry_out(folder, self._reclaims.reclaim(ordinal), fact)

    def _running(self, folder: Path, request: dict[str, Any]) -> NodeFact:
        """Return the fact of a node that has not ended. An existing agent is billed from the request on."""
        agent, ready = _read(folder / "agent.json"), _read(folder / "ready.json")
        notice = _read(folder / "notice.json")
        return NodeFact(
            name=folder.name,
            status=NodeStatus.UP if agent and ready else NodeStatus.PENDING,
            started_ms=int(request["requested_ms"]) if agent else None,
            ready_ms=int(ready["at_ms"]) if ready else None,
            notice_deadline_ms=int(notice["deadline_ms"]) if notice else None,
        )

    def _ended_by_itself(self, folder: Path) -> NodeFact | None:
        """Return the node's end, recorded or found now. None: the node runs, or is starting."""
        record = _read(folder / "ended.json")
        if record is not None:
            return _ended_fact(folder, record)
        request, agent = self._requested(folder), _read(folder / "agent.json")
        if request is None:
            return None
        now_ms = self._clock.now_ms()
        spawned = _read(folder / "spawned.json")
        waited = self._clock.wall_seconds(now_ms - int((spawned or request).get("at_ms", request["requested_ms"])))
        if agent is None:
            exits = read_exits(folder)
            is_coming = not exits and (spawned is None or processes.is_recorded_alive(spawned))
            if is_coming or processes.processes_of(folder):
                if waited <= AGENT_SECONDS:
                    return None
                return self._end(folder, f"no agent appeared within {AGENT_SECONDS:.0f} s", now_ms)
            # The process may have written agent.json between the read above and its end. Its files are final now.
            agent = _read(folder / "agent.json")
            if agent is None:
                last = next(reversed(exits), None)
                return self._end(folder, self._exit_evidence(folder, last) + " before it was an agent", now_ms)
        if not processes.is_recorded_alive(agent):
            if self._is_reclaimed(folder, request):
                return None  # an interrupted preemption by the local cloud: `_carry_out` completes the work
            return self._end(folder, self._exit_evidence(folder, agent["pid"]), self._last_moment(folder, now_ms))
        if _read(folder / "ready.json") is None and waited > READY_SECONDS:
            return self._end(folder, f"its workers did not call in within {READY_SECONDS:.0f} s", now_ms)
        if self._is_reclaimed(folder, request):
            return None
        return self._ended_when_stopped(folder, int(agent["pid"]), now_ms)

    def _requested(self, folder: Path) -> dict[str, Any] | None:
        """Return the recorded request. A damaged record is rebuilt from the started process."""
        request, file = _read(folder / "request.json"), folder / "request.json"
        if request is None and file.exists():
            spawned = _read(folder / "spawned.json") or {"at_ms": self._clock.now_ms()}
            request = {"requested_ms": spawned["at_ms"], "zone": "", "ordinal": None}
            _write(file, request)
        return request

    def _is_reclaimed(self, folder: Path, request: dict[str, Any]) -> bool:
        """Return whether a preemption of the node is under way, which `_carry_out` will complete."""
        is_known = _read(folder / "reclaim.json") is not None and _read(folder / "ready.json") is not None
        return is_known and self._reclaims is not None and request.get("ordinal") is not None

    def _ended_when_stopped(self, folder: Path, pid: int, now_ms: int) -> NodeFact | None:
        """Return the end of a node that stopped without an order and stayed stopped, else None."""
        mark = folder / "stopped.json"
        if not processes.is_stopped(pid):
            mark.unlink(missing_ok=True)
            return None
        since = _read(mark)
        if since is None:
            _write(mark, {"at_ms": now_ms})
            return None
        if self._clock.wall_seconds(now_ms - int(since["at_ms"])) < STOPPED_SECONDS:
            return None
        return self._end(folder, "it stood still (SIGSTOP) and did not come back", now_ms, signal="SIGSTOP")

    def _last_moment(self, folder: Path, now_ms: int) -> int:
        """Return the end time of a dead agent: its own report, else now, but never after its spend deadline."""
        said = _read(folder / "exit.json")
        if said is not None:
            return int(said["at_ms"])
        deadline = (_read(folder / "money.json") or {}).get("deadline_ms")
        deadline = deadline or (_read(folder / "node.json") or {}).get("money_deadline_ms")
        return now_ms if deadline is None else min(now_ms, int(deadline))

    def _exit_evidence(self, folder: Path, pid: int | None) -> str:
        """Describe the end of the agent with this pid. Call only after the agent was seen dead.

        The exit code is read here, after the death was seen. Read earlier, a process could die between the two reads
        and seem to have no exit code. Only the starter learns the code, so a restarted controller knows the code only
        if the agent wrote exit.json. A second agent of the node, which found the lock taken, has a different pid.
        """
        until = time.monotonic() + REAP_SECONDS
        while (code := read_exits(folder).get(pid or 0)) is None and pid is not None and processes.is_zombie(pid):
            if time.monotonic() > until:
                break
            time.sleep(0.005)  # the starter is about to write the code
        report = _read(folder / "exit.json")
        if report is not None:
            code = int(report["code"])
        if code is None:
            return "its agent is gone"
        if code < 0:
            return f"its agent was killed by {signal.Signals(-code).name}"
        text = str((report or {}).get("text", ""))
        return f"its agent exited with code {code}" + (f": {text}" if text else "")

    # --- ending -----------------------------------------------------------------------------------

    def _carry_out(self, folder: Path, reclaim: Reclaim, fact: NodeFact) -> NodeFact:
        """Preempt the node when due: first the notice, then the end."""
        assert fact.ready_ms is not None
        now_ms, manner = self._clock.now_ms(), reclaim.manner
        end_ms = fact.ready_ms + reclaim.lifetime_ms
        if manner.with_notice:
            if fact.notice_deadline_ms is None and now_ms >= end_ms - reclaim.notice_ms:
                # The local cloud does nothing without a controller, and still gives the whole notice.
                _write(folder / "notice.json", {"deadline_ms": max(end_ms, now_ms + reclaim.notice_ms)})
                return self._running(folder, self._requested(folder) or {})
            end_ms = fact.notice_deadline_ms or end_ms + reclaim.notice_ms
        if now_ms < end_ms:
            return fact
        taken = _read(folder / "reclaim.json")
        if taken is None:
            taken = {"at_ms": now_ms}
            _write(folder / "reclaim.json", taken)
        if manner.signal == "SIGSTOP" and now_ms < int(taken["at_ms"]) + SILENCE_MS:
            agent = _read(folder / "agent.json")
            processes.send(
                [pid for pid in processes.processes_of(folder, agent) if not processes.is_stopped(pid)], signal.SIGSTOP
            )
            return fact  # a silent stop: the loss is not reported yet
        notice = f"{duration(reclaim.notice_ms)} notice" if manner.with_notice else "no notice"
        evidence = (
            f"reclaimed by the local cloud {duration(max(1, int(taken['at_ms']) - fact.ready_ms))} after it was "
            f"ready: {manner.signal}, {notice}"
        )
        ended = self._end(
            folder,
            evidence,
            int(taken["at_ms"]),
            reclaimed=True,
            signal=manner.signal,
            with_notice=manner.with_notice,
        )
        return ended or fact

    def _end(self, folder: Path, evidence: str, ended_ms: int, **how: Any) -> NodeFact | None:
        """Kill the node's processes, then record the end. None: a process still runs, and the next pass tries again."""
        agent = _read(folder / "agent.json")
        with contextlib.suppress(OSError):  # a full disk must not keep a node alive
            (folder / ENDING).touch(mode=0o600)
        if processes.kill_all(folder, agent):
            return None
        request = self._requested(folder)
        started_ms = int(request["requested_ms"]) if request and agent else None
        notice = _read(folder / "notice.json")
        record = {
            "evidence": evidence,
            "started_ms": started_ms,
            "ended_ms": max(ended_ms, started_ms or 0),
            "ready_ms": (_read(folder / "ready.json") or {}).get("at_ms"),
            "notice_deadline_ms": notice["deadline_ms"] if notice else None,
            **how,
        }
        _write(folder / "ended.json", record)
        return _ended_fact(folder, record)


def _ended_fact(folder: Path, record: dict[str, Any]) -> NodeFact:
    return NodeFact(name=folder.name, status=NodeStatus.GONE, **record)


def _read(path: Path) -> dict[str, Any] | None:
    """Return the JSON object in the file, or None when the file is missing or damaged."""
    try:
        value = json.loads(path.read_text())
    except (FileNotFoundError, ValueError):
        return None
    return value if isinstance(value, dict) else None


def _write(path: Path, value: dict[str, Any]) -> None:
    """Replace the file durably, readable by its owner only: node.json holds the run's token."""
    write_durably(path, json.dumps(value).encode())
