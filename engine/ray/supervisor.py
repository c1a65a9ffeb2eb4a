"""Keep the coordinator and one worker per slot alive, on a Ray cluster with a changing set of spot nodes.

look (nodes, deaths, pings) -> compare with the wanted actors -> make missing actors, inform the coordinator

The supervisor keeps no state: every actor has a name and outlives the supervisor, so a restarted supervisor adopts the
existing actors. The supervisor reports a death to the coordinator at once. The report may be wrong (Ray calls actors
"unavailable" that come back): the coordinator revokes the lease of a worker still alive at the worker's next call, and
the worker pulls again.
"""

import contextlib
import os
import signal
import time
from dataclasses import dataclass, field
from typing import Any

import psutil
import ray
from ray.exceptions import RayError, RayTaskError
from ray.util.placement_group import get_placement_group, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from engine.node.child import died_too_often, read_note
from engine.node.frozen import FROZEN_SECONDS
from engine.node_spec import NodeSpec
from engine.protocol.codec import encode
from engine.protocol.messages import NodeLost, Observation, WorkerDied
from engine.ray.cluster import NAMESPACE
from engine.ray.coordinator import ANSWER_SECONDS, NAME, CoordinatorActor, pid_file
from engine.ray.worker import WorkerActor

LOOK_SECONDS = 0.1
"""Interval of looks at the nodes. A worker's death wakes the supervisor at once."""

PING_SECONDS = 0.5
LONGEST_PAUSE_SECONDS = 3.0
"""Maximum seconds between a worker's death and its restart, after repeated deaths."""


@dataclass(kw_only=True)
class _Slot:
    """Slot of one worker on one node, as known to Ray. A node that joins again gets another id."""

    node: str
    node_id: str
    number: int
    actor: Any = None
    boot_ref: Any = None
    serve_ref: Any = None
    boot: int | None = None
    deaths: int = 0
    not_before: float = 0.0

    @property
    def worker(self) -> str:
        return f"{self.node}/{self.number}"

    @property
    def actor_name(self) -> str:
        return f"{self.worker}@{self.node_id}"


def gpus_of_a_worker(gpus: int, workers: int) -> float:
    """Return a worker's share of the node's GPUs: whole GPUs, or an equal part of a shared GPU.

    Ray counts GPUs in units of 1 / 10,000.
    """
    if gpus >= workers:
        return float(gpus // workers)
    return 10_000 // -(-workers // gpus) / 10_000


@dataclass
class Supervisor:
    spec: NodeSpec
    address: str
    slots: dict[tuple[str, int], _Slot] = field(default_factory=dict)
    groups: dict[str, Any] = field(default_factory=dict)
    reported_lost: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._unsent: list[Observation] = []
        """Reports that the coordinator has not acknowledged."""
        self._sending: Any = None
        self._ping: Any = None
        self._pinged = 0.0
        self._ping_again = 0.0
        # GCS lists a node as alive before the node takes part in the cluster, and keeps dead nodes in the list.
        self._coordinator = self._make_coordinator()

    def wait_for_coordinator(self) -> None:
        ray.get(self._coordinator.ping.remote(), timeout=60.0)

    def run(self) -> None:
        """Supervise for ever. Raises RayError if the cluster is gone; the agent then restarts everything."""
        while True:
            self.look()

    def look(self) -> None:
        """Make one pass. Takes LOOK_SECONDS, or less if a worker dies."""
        self._look_at_nodes()
        for slot in self.slots.values():
            self._look_at(slot)
        self._watch_coordinator()
        self._send()
        waiting = [slot.serve_ref for slot in self.slots.values() if slot.serve_ref is not None]
        if not waiting:
            time.sleep(LOOK_SECONDS)
        else:
            ray.wait(waiting, num_returns=1, timeout=LOOK_SECONDS, fetch_local=False)

    # --- nodes ------------------------------------------------------------------------------------------

    def _look_at_nodes(self) -> None:
        for node in ray.nodes():
            labels, node_id = node["Labels"], node["NodeID"]
            if labels.get("market") != "spot":
                continue
            if node["Alive"] and node_id not in self.groups:
                self._adopt_node(labels["node"], node_id, int(node["Resources"].get("CPU", 0)), node["Resources"])
            elif not node["Alive"] and node_id not in self.reported_lost:
                self.reported_lost.add(node_id)
                self._forget_node(labels["node"], node_id)

    def _adopt_node(self, node: str, node_id: str, workers: int, resources: dict[str, float]) -> None:
        """Reserve the node's slots in one placement group on this exact node.

        The workers can then form an SP group later.
        """
        if workers == 0:
            return
        bundle = {"CPU": 1.0}
        if gpus := int(resources.get("GPU", 0)):
            bundle["GPU"] = gpus_of_a_worker(gpus, workers)
        name = f"{node}@{node_id}"
        try:
            group = get_placement_group(name)
        except ValueError:
            group = placement_group(
                [bundle] * workers,
                strategy="STRICT_PACK",
                name=name,
                lifetime="detached",
                bundle_label_selector=[{"ray.io/node-id": node_id, "market": "spot"}] * workers,
            )
        print(f"{node} is here, with {workers} slot(s)", flush=True)
        self.groups[node_id] = (group, bundle)
        for number in range(workers):
            self.slots[node_id, number] = _Slot(node=node, node_id=node_id, number=number)

    def _forget_node(self, node: str, node_id: str) -> None:
        print(f"{node} is gone", flush=True)
        came_back = any(slot.node == node and slot.node_id != node_id for slot in self.slots.values())
        for slot in [slot for slot in self.slots.values() if slot.node_id == node_id]:
            self._report_death(slot, "its node is gone")
            del self.slots[slot.node_id, slot.number]
        if not came_back:
            self._unsent.append(NodeLost(node=node, reason="Ray lost its node"))
        if node_id in self.groups:
            with contextlib.suppress(RayError):
                remove_placement_group(self.groups.pop(node_id)[0])

    # --- workers ----------------------------------------------------------------------------------------

    def _look_at(self, slot: _Slot) -> None:
        if slot.serve_ref is None:
            if slot.actor is None and time.monotonic() >= slot.not_before:
                self._start(slot)
            return
        if slot.boot is None:
            done, _ = ray.wait([slot.boot_ref], timeout=0)
            if done:
                with contextlib.suppress(RayError):
                    slot.boot = ray.get(slot.boot_ref)
        done, _ = ray.wait([slot.serve_ref], timeout=0, fetch_local=False)
        if not done:
            return
        try:
            reason = ray.get(slot.serve_ref)
        except RayError as error:
            self._died(slot, error)
        else:
            print(f"{slot.worker} has ended: {reason}", flush=True)
            slot.serve_ref = None  # the actor stays, and its slot is not filled again

    def _start(self, slot: _Slot) -> None:
        group, bundle = self.groups[slot.node_id]
        make = ray.remote(WorkerActor).options(
            name=slot.actor_name,
            namespace=NAMESPACE,
            get_if_exists=True,
            lifetime="detached",
            max_restarts=0,
            max_concurrency=8,  # room for concurrent serve calls, of this supervisor and of its successor
            num_cpus=1,
            num_gpus=bundle.get("GPU", 0),
            scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=slot.number),
        )
        slot.actor = make.remote(slot.number)
        slot.boot = None
        slot.boot_ref = slot.actor.boot.remote()
        slot.serve_ref = slot.actor.serve.remote()

    def _died(self, slot: _Slot, error: RayError) -> None:
        slot.deaths += 1
        text = " ".join(str(error).split())[:300]
        print(f"{slot.worker} died ({type(error).__name__}), death {slot.deaths}: {text}", flush=True)
        self._report_death(slot, f"its process died ({type(error).__name__})")
        with contextlib.suppress(RayError, ValueError):
            ray.kill(slot.actor)  # the actor may only be unavailable, or have raised
        slot.actor = slot.serve_ref = None
        pause = 0.0 if slot.deaths == 1 else min(LONGEST_PAUSE_SECONDS, 0.1 * 2**slot.deaths)
        slot.not_before = time.monotonic() + pause

    def _report_death(self, slot: _Slot, reason: str) -> None:
        if slot.boot is None and slot.boot_ref is not None:
            with contextlib.suppress(RayError):
                slot.boot = ray.get(slot.boot_ref, timeout=0)
        if slot.boot is None:
            return  # the worker never called in
        self._unsent.append(WorkerDied(worker=slot.worker, node=slot.node, boot=slot.boot, reason=reason))
        self._send()

    # --- the coordinator --------------------------------------------------------------------------------

    def _make_coordinator(self) -> Any:
        make = ray.remote(CoordinatorActor).options(
            name=NAME,
            namespace=NAMESPACE,
            get_if_exists=True,
            lifetime="detached",
            max_restarts=-1,
            max_task_retries=0,  # callers repeat failed calls themselves
            max_concurrency=1000,
            num_cpus=0,
            label_selector={"market": "on-demand", "node": self.spec.node},
        )
        return make.remote(self.spec.model_dump_json(), self.address)

    def _send(self) -> None:
        """Send the reports in order, each until the coordinator answers."""
        while True:
            if self._sending is not None:
                done, _ = ray.wait([self._sending], timeout=0)
                if not done:
                    return
                try:
                    reply = ray.get(self._sending)
                except RayTaskError as error:
                    print(f"the coordinator could not take {self._unsent[0]}: {error}", flush=True)
                except RayError:
                    self._sending = None
                    return  # Ray is restarting the coordinator
                else:
                    if reply[0] == "full":
                        self._sending = None
                        return
                self._sending = None
                self._unsent.pop(0)
            if not self._unsent:
                return
            self._sending = self._coordinator.call.remote(self.spec.own_token, encode(self._unsent[0]), {})
            ray.wait([self._sending], timeout=0.05)

    def _watch_coordinator(self) -> None:
        """Ping the coordinator and kill a frozen one. Ray detects a dead coordinator, but not a frozen coordinator."""
        now = time.monotonic()
        if died_too_often(pid_file(self.spec)):
            raise RuntimeError("the coordinator died too often without progress")
        if self._ping is None:
            if now >= self._ping_again:
                self._ping, self._pinged = self._coordinator.ping.remote(), now
            return
        done, _ = ray.wait([self._ping], timeout=0)
        if done:
            with contextlib.suppress(RayError):
                ray.get(self._ping)
            self._ping, self._ping_again = None, now + PING_SECONDS
        elif now - self._pinged > FROZEN_SECONDS:
            self._kill_coordinator()
            self._pinged = now + ANSWER_SECONDS

    def _kill_coordinator(self) -> None:
        with contextlib.suppress(OSError, KeyError, psutil.NoSuchProcess):
            process = read_note(pid_file(self.spec))
            if psutil.Process(process["pid"]).create_time() == process["create_time"]:
                print("the coordinator is frozen: killed", flush=True)
                os.kill(process["pid"], signal.SIGKILL)
