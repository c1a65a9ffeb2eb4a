"""Start Ray's own processes on a node: the head (GCS and raylet) beside the trainer, a raylet on every spot node.

The processes are started through Ray's `Node`, which `ray start` uses too. Unlike `ray start`, `Node` can keep a
cluster on loopback, and can leave out the dashboard, monitor, log monitor and Ray client server. If all nodes are on
one machine, every process listens on 127.0.0.1 only. For nodes on several machines, Ray 2.60 listens on every
interface, and no setting changes this (measured). Two checks then refuse foreign connections: every connection needs
the run's token, and the cloud's firewall admits only the run's nodes. Ray's processes end with the process that started
Ray.
"""

import contextlib
import ctypes
import hashlib
import json
import logging
import os
import signal
import socket
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
import ray
from ray._private import services
from ray._private.node import Node
from ray._private.parameter import RayParams
from ray._raylet import (  # type: ignore[attr-defined]
    DASHBOARD_AGENT_LISTEN_PORT_NAME,
    METRICS_AGENT_PORT_NAME,
    METRICS_EXPORT_PORT_NAME,
    RUNTIME_ENV_AGENT_PORT_NAME,
    persist_port,
)
from ray.job_config import JobConfig

from engine.node_spec import NodeSpec

NAMESPACE = "spotrl"

HEALTH = {
    "health_check_initial_delay_ms": 1000,
    "health_check_period_ms": 500,
    "health_check_timeout_ms": 500,
    "health_check_failure_threshold": 3,
}
"""Health check of Ray. A frozen node is detected in 3 s instead of Ray's 66 s. A node declared dead by mistake only
restarts."""

OBJECT_STORE_BYTES = 256 << 20
"""Object store size for the shipped model: three versions of its weights and the data in flight. Larger models use
Ray's default."""

CONNECT_SECONDS = 60.0

LONGEST_SOCKET_PATH = 100
"""Longest socket path. The kernel allows 107 bytes; Ray appends nothing to these paths."""


AGENTS = ("--dashboard_agent_command=", "--runtime_env_agent_command=")
"""Flags of two Python processes beside every raylet, for the dashboard and for runtime environments. A run uses
neither.

The processes outlive a killed raylet by a minute, because both report the raylet's death to a head that may be dead
too. The processes bear no mark, so cleanup cannot find them. Ray insists on a command: `cat` ends when the raylet's end
of the pipe closes.
"""


AGENT_PORTS = (
    METRICS_AGENT_PORT_NAME,
    METRICS_EXPORT_PORT_NAME,
    DASHBOARD_AGENT_LISTEN_PORT_NAME,
    RUNTIME_ENV_AGENT_PORT_NAME,
)
"""Names of the agents' ports. A raylet waits until a file holds each port, so the ports are written without the
agents."""

NO_PORT = 1
"""Port without a listener."""


class _Lean(Node):
    """Ray node without dashboard and without the raylet's agents.

    Ray starts a dashboard even for `include_dashboard=False`.
    """

    def start_api_server(self, **_: Any) -> None:
        pass

    def start_raylet(self, *arguments: Any, **options: Any) -> None:
        for name in AGENT_PORTS:
            persist_port(self._session_dir, self._node_id, name, NO_PORT)
        start = services.start_ray_process

        def start_without_agents(command: list[str], *more: Any, **how: Any) -> Any:
            lean = [next((f"{flag}cat" for flag in AGENTS if word.startswith(flag)), word) for word in command]
            return start(lean, *more, **how)

        services.start_ray_process = start_without_agents
        try:
            super().start_raylet(*arguments, **options)
        finally:
            services.start_ray_process = start


class _InstalledCode(JobConfig):
    """Job configuration that restricts the imports of Ray's workers to installed code.

    The workers import nothing from the folder in which the user called `spotrl launch`. Ray puts the launch folder
    first on the workers' path, so a user's engine.py would replace the engine. Ray omits the folder if the job brings a
    working directory of its own.
    """

    def _runtime_env_has_working_dir(self) -> bool:
        return True


def start_head(spec: NodeSpec) -> tuple[Node, str]:
    """Start GCS and raylet of this run. Returns the Ray node and the cluster's address."""
    _stay_on_loopback()
    port = _free_port(spec.coordinator_host)
    params = _params(
        spec, cpus=1, gcs_server_port=port, no_monitor=True, _system_config=HEALTH, node_ip=spec.coordinator_host
    )
    node = _Lean(params, head=True, shutdown_at_exit=False)
    return node, f"{spec.coordinator_host}:{port}"


def start_raylet(spec: NodeSpec, address: str) -> Node:
    """Join this spot node to the cluster, with one CPU slot per worker. Ray finds the node's GPUs by itself (NVML)."""
    _stay_on_loopback()
    node_ip = _own_address(address)
    return _Lean(_params(spec, cpus=spec.workers, gcs_address=address, node_ip=node_ip), shutdown_at_exit=False)


def connect(spec: NodeSpec, address: str) -> None:
    """Make this process a driver of the cluster. Raises ConnectionError if the cluster does not answer."""
    _stay_on_loopback()
    host, _, port = address.rpartition(":")
    with contextlib.closing(socket.create_connection((host, int(port)), timeout=2.0)):
        pass  # fail fast: Ray itself keeps calling a dead head for half a minute
    ray.init(
        address,
        namespace=NAMESPACE,
        log_to_driver=False,
        logging_level=logging.ERROR,
        job_config=_InstalledCode(),
        _node_ip_address=_own_address(address),
    )


def broken(node: Node) -> str | None:
    """Return a description of the failure of Ray's processes on this node, or None."""
    dead = node.dead_processes()
    if dead:
        return ", ".join(f"{name} ended with {process.returncode}" for name, process in dead)
    for name, process in node.live_processes():
        with contextlib.suppress(psutil.NoSuchProcess):
            if psutil.Process(process.pid).status() == psutil.STATUS_STOPPED:
                return f"{name} stands still"
    return None


def die_with_raylet() -> None:
    """Have the kernel kill this process when the parent raylet ends in any way."""
    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
    if os.getppid() == 1:
        os._exit(1)


def ray_file(spec: NodeSpec) -> Path:
    """Return the file with the head's address, for the other processes of the node."""
    return Path(spec.folder) / "ray.json"


def head_address(spec: NodeSpec) -> str | None:
    try:
        return str(json.loads(ray_file(spec).read_text())["address"])
    except (OSError, ValueError, KeyError):
        return None


def connect_beside_head(spec: NodeSpec) -> str:
    """Connect from the head's own node, waiting until the head is up.

    Returns the address. Raises ConnectionError after `CONNECT_SECONDS`.
    """
    until = time.monotonic() + CONNECT_SECONDS
    while True:
        address = head_address(spec)
        if address is not None:
            try:
                connect(spec, address)
                return address
            except (OSError, RuntimeError, ValueError) as error:
                print(f"the Ray head at {address} does not answer yet: {error}", flush=True)
        if time.monotonic() > until:
            raise ConnectionError(f"no Ray head on {spec.node} after {CONNECT_SECONDS:.0f} s")
        time.sleep(0.1)


def _stay_on_loopback() -> None:
    # Ray replaces 127.0.0.1 by an address reachable from outside, and would listen on the external address.
    services.resolve_ip_for_localhost = lambda host: host


def _params(spec: NodeSpec, *, cpus: int, node_ip: str, **more: Any) -> RayParams:
    sockets = _socket_folder(spec)
    return RayParams(
        node_ip_address=node_ip,
        num_cpus=cpus,
        labels={"market": str(spec.market).replace("_", "-"), "node": spec.node},
        object_store_memory=OBJECT_STORE_BYTES if spec.engine.model.path is None else None,
        temp_dir=str(Path(spec.folder) / "ray"),
        plasma_store_socket_name=str(sockets / "store"),
        raylet_socket_name=str(sockets / "raylet"),
        include_dashboard=False,
        include_log_monitor=False,  # type: ignore[arg-type]  # declared as text, read as a bool
        **more,
    )


def _socket_folder(spec: NodeSpec) -> Path:
    """Return an empty folder for sockets, accessible only to its owner.

    The folder is in the node's folder, or in the temporary folder if a socket's path would get too long.
    """
    own = Path(spec.folder) / "socket"
    if len(str(own / "sockets" / "raylet")) > LONGEST_SOCKET_PATH:
        own = Path(tempfile.gettempdir()) / f"spotrl-{hashlib.sha256(spec.folder.encode()).hexdigest()[:12]}"
    own.mkdir(mode=0o700, exist_ok=True)
    sockets = own / "sockets"  # Ray makes this folder readable for all users
    sockets.mkdir(exist_ok=True)
    for socket_file in sockets.iterdir():
        socket_file.unlink()
    return sockets


def _own_address(address: str) -> str:
    """Return this machine's address as seen from the head; loopback if the head is on loopback."""
    host, _, port = address.rpartition(":")
    with contextlib.closing(socket.socket(socket.AF_INET, socket.SOCK_DGRAM)) as probe:
        probe.connect((host, int(port)))
        return str(probe.getsockname()[0])


def _free_port(host: str) -> int:
    with contextlib.closing(socket.socket()) as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])
