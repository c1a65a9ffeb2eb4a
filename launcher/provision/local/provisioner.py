"""The local infra: a node is a process session on this machine, and the node's folder is its disk.

RUN/nodes/NAME/  node.json (NodeSpec)  request.json  spawned.json  agent.json  ready.json  notice.json
                 money.json  preempted_at.json  reclaim.json  stopped.json  assigned.json  former.json  ending
                 exits.jsonl  ended.json  logs/  progress/

`LocalProvisioner` plays the cloud: it starts nodes, reports their state, and preempts spot nodes by a printed rule. All
state is in the folders, so any process may continue the work, and a crash between any two lines is repaired by the next
`request` or `observe`.

node_records.py reads and writes the files. node_end.py finds and causes the end of a node. preempting.py carries out a
preemption.
"""

import json
from collections.abc import Callable, Sequence
from pathlib import Path

from engine.clock import Clock, boot_ms
from engine.events import IterationDone, Market
from engine.node_spec import NodeSpec
from engine.work_clock import WorkClock
from launcher.decide.node_facts import NodeFact, NodeStatus
from launcher.placement.placement import Placement
from launcher.provision.local import processes
from launcher.provision.local.agent_starter import AGENT, AgentStarter
from launcher.provision.local.node_end import ASSIGNED, FORMER, end_node, find_end
from launcher.provision.local.node_records import NodeRecords
from launcher.provision.local.preempting import order_planned, planned_for, preempt_when_due
from launcher.provision.local.preemptions import PreemptionSchedule
from launcher.provision.progress import ProgressFiles

START_SECONDS = 3.0
"""Work gets so far ahead of a starting node, in seconds of the reference machine. So a node is replaced while the run
goes on, also where work is quick and starts are slow."""

STARTING_SECONDS = 60.0
"""A node that has been starting for so long (wall time) is not waited for."""


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
        schedule: PreemptionSchedule | None,
        agent: str = AGENT,
        boot: Callable[[], int] = boot_ms,
    ) -> None:
        """Create the provisioner.

        `agent`: module or file of the agent program. `boot`: this machine's boot clock (ms).
        """
        self._folder, self._clock, self._schedule, self._boot = folder, clock, schedule, boot
        self._starter = AgentStarter(folder / "starter.log", agent)
        self._progress, self._iterations = ProgressFiles(), 0
        self._is_planned = schedule is not None and bool(schedule.planned)
        """True while a preemption at a fixed iteration is left."""

    # --- calls of the controller ---------------------------------------------------------------------

    def request(self, want: Placement, spec: NodeSpec) -> None:
        """Start the node's agent, unless the node was started or ended before. A repeated name is one node.

        A crash may leave an unrecorded process. Then the node gets a second agent, which finds the node's lock taken
        and exits.
        """
        node = self._node(spec.node)
        folder = node.folder
        if Path(spec.folder) != folder:
            raise ValueError(f"{spec.node} has its disk in {spec.folder}; this provisioner keeps it in {folder}")
        (folder / "logs").mkdir(parents=True, exist_ok=True, mode=0o700)
        if node.read("ended.json") is not None:
            return
        if node.read("node.json") is None:
            node.write("node.json", json.loads(spec.model_dump_json()))
        if node.read("request.json") is None:
            facts = {"requested_ms": self._clock.now_ms(), "zone": want.zone, "ordinal": self._ordinal(want.market)}
            node.write("request.json", {**facts, "boot_ms": self._boot()})
        if node.read("agent.json") is None and not processes.processes_of(folder):
            self._spawn(node)

    def assign(self, spec: NodeSpec) -> None:
        """End the node's processes and start its agent with this spec.

        `assigned.json` is there from the first step to the last, so a controller that takes over repeats them all.
        """
        node = self._node(spec.node)
        if node.read("ended.json") is not None or node.read("reclaim.json") is not None:
            return
        old = node.read("node.json") or {}
        if (old.get("role"), old.get("generation")) == (spec.role, spec.generation) and node.read(ASSIGNED) is None:
            return
        agent = node.read("agent.json")
        former = [*(node.read(FORMER) or {"agents": []})["agents"], *([agent["pid"]] if agent else [])]
        node.write(ASSIGNED, {"boot_ms": self._boot()})
        node.write(FORMER, {"agents": former})
        if processes.kill_all(node.folder, agent):
            return  # a process still runs, and the next pass goes on
        for name in ("agent.json", "ready.json", "exit.json", "spawned.json", "stopped.json"):
            (node.folder / name).unlink(missing_ok=True)
        node.write("node.json", json.loads(spec.model_dump_json()))
        self._spawn(node)
        (node.folder / ASSIGNED).unlink()

    def observe(self) -> Sequence[NodeFact]:
        """Return the state of every node of this run. Also plays the cloud: due spot nodes are preempted here."""
        now_ms = self._clock.now_ms()
        if self._schedule is not None and self._is_planned:
            self._is_planned = order_planned(self._schedule, self._nodes(), self._finished_iterations)
        observed = [(node, fact) for node in self._nodes() if (fact := self._observe(node)) is not None]
        if isinstance(self._clock, WorkClock):
            self._keep_clock(
                self._clock, now_ms, [node for node, fact in observed if fact.status is NodeStatus.PENDING]
            )
        return [fact for _, fact in observed]

    def release(self, names: Sequence[str]) -> None:
        """SIGKILL every process of the nodes. A node without a request can no longer be requested afterwards."""
        for node in map(self._node, names):
            node.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            if node.requested() is None:
                end_node(node, "released before it was started", self._clock.now_ms())
            elif self._find_end(node) is None:
                end_node(node, "released", self._clock.now_ms())

    def rearm(self, name: str, money_deadline_ms: int) -> None:
        """Write the node's new spend deadline beside its node.json, which never changes."""
        node = self._node(name)
        if node.folder.exists() and node.read("ended.json") is None:
            node.write("money.json", {"deadline_ms": money_deadline_ms})

    def tunnel(self, name: str, port: int) -> tuple[str, int] | None:
        """Return localhost: every node is this machine."""
        return "127.0.0.1", port

    def tidy(self) -> bool:
        """Return True. Nodes leave nothing behind except their folders."""
        return True

    def close(self) -> None:
        """End the process that starts agents. The agents continue."""
        self._starter.close()

    def _keep_clock(self, clock: WorkClock, now_ms: int, starting: Sequence[NodeRecords]) -> None:
        """Tell the run's clock about this pass. Starts take as much of the run's time on every machine."""
        limits_ms = [now_ms]
        for node in starting:
            request = node.requested()
            if request is not None and node.seconds_since(request) < STARTING_SECONDS:
                began_ms = (node.read("spawned.json") or {}).get("at_ms", request["requested_ms"])
                limits_ms.append(int(began_ms) + round(START_SECONDS * 1000 * clock.factor))
        clock.watched(min(limits_ms))
        if starting:
            clock.hold()

    # --- one node ---------------------------------------------------------------------------------

    def _node(self, name: str) -> NodeRecords:
        return NodeRecords(node_folder(self._folder, name), self._clock, self._boot)

    def _nodes(self) -> list[NodeRecords]:
        root = nodes_folder(self._folder)
        return [self._node(path.name) for path in sorted(root.iterdir()) if path.is_dir()] if root.exists() else []

    def _spawn(self, node: NodeRecords) -> None:
        """Have the agent started.

        `spawned.json` names the starter: while the starter lives, an agent may still appear.
        """
        starter = self._starter.start(node.folder / "node.json")
        node.write("spawned.json", {**starter, "at_ms": self._clock.now_ms(), "boot_ms": self._boot()})

    def _ordinal(self, market: Market) -> int | None:
        """Return a new spot node's ordinal in the order of purchase, which decides the lifetime.

        None: an on-demand node.
        """
        if market is not Market.SPOT:
            return None
        requests = (node.read("request.json") or {} for node in self._nodes())
        bought = [request["ordinal"] for request in requests if request.get("ordinal") is not None]
        return max(bought, default=-1) + 1

    def _observe(self, node: NodeRecords) -> NodeFact | None:
        ended = self._find_end(node)
        if ended is not None:
            return ended
        request = node.requested()
        if request is None:
            return None  # an interrupted request; a repeated request completes the files
        fact = node.fact_of_running(request)
        if self._schedule is None or fact.ready_ms is None:
            return fact
        planned = planned_for(node, self._schedule, fact)
        return fact if planned is None else preempt_when_due(node, planned, fact)

    def _finished_iterations(self) -> int:
        """Return the number of iterations that the run has finished, as its trainers report them."""
        for node in self._nodes():
            for line in self._progress.read(node.folder):
                if isinstance(line.event, IterationDone):
                    self._iterations = max(self._iterations, line.event.iteration + 1)
        return self._iterations

    def _find_end(self, node: NodeRecords) -> NodeFact | None:
        return find_end(node, are_nodes_preempted=self._schedule is not None)
