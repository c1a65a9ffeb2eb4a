"""Run a node's processes under Ray: head and supervisor beside the trainer, a raylet on every spot node."""

import contextlib
import json
import sys
import time
from multiprocessing.synchronize import Event
from typing import Any

import httpx
import psutil

from engine.node.child import EXIT_UNANSWERED, SharedHeartbeat, begin, read_note
from engine.node.frozen import FROZEN_SECONDS
from engine.node_spec import NodeSpec
from engine.ray.cluster import (
    broken,
    connect_beside_head,
    ray_file,
    start_head,
    start_raylet,
)
from engine.ray.coordinator import pid_file
from engine.ray.supervisor import Supervisor
from engine.ray.worker import forget_marks, states

LOOK_SECONDS = 0.1

ASK_SECONDS = 1.0
"""Interval at which a spot node checks its cluster's address. A new trainer node makes a new cluster."""


def run_ray_head(spec: NodeSpec, heartbeat: SharedHeartbeat, ready: Event) -> None:
    """Run GCS and raylet of the on-demand node. Ends when either ends."""
    begin(spec, "ray", heartbeat)
    ray_file(spec).unlink(missing_ok=True)
    node, address = start_head(spec)
    fresh = ray_file(spec).with_suffix(".new")
    fresh.write_text(json.dumps({"address": address}))
    fresh.replace(ray_file(spec))
    print(f"Ray's head is at {address}", flush=True)
    ready.set()
    watch = _Watch(spec, node)
    while True:
        watch.look()
        time.sleep(LOOK_SECONDS)


def run_ray_supervisor(spec: NodeSpec, heartbeat: SharedHeartbeat, ready: Event) -> None:
    """Supervise the cluster's coordinator and workers while the head lives."""
    begin(spec, "supervisor", heartbeat)
    supervisor = Supervisor(spec, connect_beside_head(spec))
    supervisor.wait_for_coordinator()
    ready.set()
    supervisor.run()


def run_raylet(spec: NodeSpec, heartbeat: SharedHeartbeat, ready: Event) -> None:
    """Take part in the run's cluster until every worker of this node was ordered to exit."""
    begin(spec, "ray", heartbeat)
    forget_marks(spec)
    with httpx.Client(headers={"Authorization": f"Bearer {spec.own_token}"}, timeout=1.0, trust_env=False) as client:
        while (address := _ask_address(client, spec)) is None:
            time.sleep(LOOK_SECONDS)
        node = start_raylet(spec, address)
        print(f"joined the Ray cluster at {address}", flush=True)
        watch, checked_at = _Watch(spec, node), time.monotonic()
        while True:
            try:
                watch.look()
            except SystemExit as end:
                if _ask_address(client, spec) == address:
                    raise
                # The cluster is gone, and the raylet ended with the cluster.
                print(end, flush=True)
                sys.exit(EXIT_UNANSWERED)
            worker_states = states(spec)
            if "broken" in worker_states:
                sys.exit(f"a worker died too often without finishing anything: {worker_states}")
            if all(state == "ready" for state in worker_states):
                ready.set()
            if all(state == "exit" for state in worker_states):
                return
            if time.monotonic() - checked_at > ASK_SECONDS:
                checked_at = time.monotonic()
                now = _ask_address(client, spec)
                if now is not None and now != address:
                    print(f"the run's Ray cluster is now at {now}, no longer at {address}", flush=True)
                    sys.exit(EXIT_UNANSWERED)
            time.sleep(LOOK_SECONDS)


class _Watch:
    """Watcher of Ray's processes. Ends this process and its children if a Ray process ends or freezes.

    A frozen actor is killed: Ray detects the death, and the supervisor makes another actor. The coordinator is left to
    the supervisor's ping, which also finds one that hangs and is not stopped.
    """

    def __init__(self, spec: NodeSpec, node: Any) -> None:
        self._spec, self._node = spec, node
        self._still_since: float | None = None
        self._actors_checked_at = 0.0
        self._stopped: dict[psutil.Process, float] = {}
        """Start time of each freeze, by child process of the raylet."""

    def look(self) -> None:
        self._look_at_actors()
        wrong = broken(self._node)
        if wrong is None:
            self._still_since = None
        elif not wrong.endswith("stands still"):
            sys.exit(wrong)
        elif self._still_since is None:
            self._still_since = time.monotonic()
        elif time.monotonic() - self._still_since > FROZEN_SECONDS:
            sys.exit(wrong)

    def _look_at_actors(self) -> None:
        now = time.monotonic()
        if now - self._actors_checked_at < ASK_SECONDS:
            return
        self._actors_checked_at = now
        other_pids = {process.pid for _, process in self._node.live_processes()}
        other_pids.add(read_note(pid_file(self._spec)).get("pid"))
        stopped = [p for p in psutil.Process().children(recursive=True) if p.pid not in other_pids and _is_stopped(p)]
        self._stopped = {process: self._stopped.get(process, now) for process in stopped}
        for process, since in self._stopped.items():
            if now - since > FROZEN_SECONDS:
                print(f"process {process.pid} is frozen: killed", flush=True)
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()


def _is_stopped(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return bool(process.status() == psutil.STATUS_STOPPED)
    return False


def _ask_address(client: httpx.Client, spec: NodeSpec) -> str | None:
    with contextlib.suppress(httpx.HTTPError, ValueError, KeyError):
        answer = client.get(f"http://{spec.coordinator_host}:{spec.coordinator_port}/ray")
        if answer.status_code == httpx.codes.OK:
            return str(answer.json()["address"])
    return None
