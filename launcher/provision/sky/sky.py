"""The few SkyPilot calls that spotrl uses: start a one-VM cluster, read the outcome, terminate, log in.

SkyPilot is imported late, because the import takes 5 s, and only in this folder. SkyPilot provisions and does nothing
else: the task has no set-up, no `run`, one resource and no choice, so SkyPilot buys exactly the decided offer.

Configuration goes with each request and is written to no file of the user. No credential file of any cloud is uploaded.
A VM runs with our own identity, in our own group, in our own network; never with SkyPilot's wide role.

A running API server, also a remote server, is used unchanged. A server started by spotrl reports no usage and has
`OurNodes` loaded (our_nodes.py), a plugin of SkyPilot's own kind. Configuration alone is not enough: SkyPilot uploads
some clouds' credential files despite the configuration, and on Google Cloud SkyPilot accepts no identity but its own.
"""

import contextlib
import io
import logging
import os
import re
import socket
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from engine.installation import install_command
from launcher.exit_codes import Failure
from launcher.provision.sky.outcome import ANSI, Failed, Outcome, outcome_of, text_of
from launcher.provision.sky.task import Launch, config_of, task_of

log = logging.getLogger(__name__)

SERVER_ENVIRONMENT: Mapping[str, str] = {
    "SKYPILOT_DISABLE_USAGE_COLLECTION": "1",
    "SKYPILOT_MINIMIZE_LOGGING": "0",
    # SkyPilot uploads a hub token after the hub confirms the token. spotrl sends tokens by name only, or not at all.
    "HF_HUB_OFFLINE": "1",
}
"""Environment of an API server started by spotrl."""

PLUGINS = "SKYPILOT_SERVER_PLUGINS_CONFIG"


class SkyUnreachable(Failure):
    """SkyPilot's API server did not answer. The state is unknown; ask again."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SkyLogin:
    """The SSH login of a cluster's VM. Contains the key itself, because the key file may be on another computer."""

    host: str
    user: str
    private_key: str
    address: str
    """The VM's private address."""


@dataclass(slots=True)
class Sky:
    """SkyPilot's SDK. A lock covers the calls that keep state in the process. Every call may block."""

    _lock: threading.Lock = field(default_factory=threading.Lock)

    def start(self, launch: Launch) -> str:
        """Send a launch and return the request id. An existing cluster of the same name is completed, not doubled.

        Raises an error of SkyPilot's, of any type, if SkyPilot's client does not take the launch.
        """
        sky = self._sky()
        from sky import skypilot_config

        with self._lock, _errors_named("launch"):
            _start_unless_it_answers()
            # From here on, an error is SkyPilot's opinion of this launch.
            task = sky.Task.from_yaml_config(task_of(launch))
            with skypilot_config.override_skypilot_config(config_of(launch.region_setup)):
                return str(sky.launch(task, cluster_name=launch.name))

    def poll(self, requests: Sequence[str]) -> dict[str, Outcome | None]:
        """Return the outcomes of requests by id; None while pending. Requests that the server forgot are missing."""
        if not requests:
            return {}
        sky = self._sky()
        with _errors_named("status of requests"):
            _start_unless_it_answers()
            payloads = sky.api_status(list(requests), all_status=True)
        statuses = {payload.request_id: str(payload.status) for payload in payloads}
        return {
            request: self._outcome(request) if _is_over(statuses[request]) else None
            for request in requests
            if request in statuses
        }

    def pending(self, prefix: str) -> dict[str, str]:
        """Return the pending launches of clusters with this name prefix: request id by name.

        Launches survive our process.
        """
        self._sky()
        with _errors_named("requests under way"):
            _start_unless_it_answers()
            return self._under_way(prefix)

    def cancel_all(self, runs: Sequence[str]) -> list[str]:
        """Cancel every pending launch of nodes of these runs, and return their names.

        Blocks while the API server is frozen.
        No API server is started for the call: a local server that is not running launches nothing.
        """
        self._sky()
        from sky.server import common

        url = common.get_server_url()
        if common.is_api_server_local(url) and not _listens(url):
            return []
        with _errors_named("requests under way"):
            under_way = self._under_way("")
        launches = {name: request for name, request in under_way.items() if any(is_node_of(name, run) for run in runs)}
        for request in launches.values():
            self.cancel(request)
        return sorted(launches)

    def _under_way(self, prefix: str) -> dict[str, str]:
        return {
            str(payload.cluster_name): payload.request_id
            for payload in self._sky().api_status(None, all_status=False)
            if payload.name.endswith("launch") and str(payload.cluster_name or "").startswith(prefix)
        }

    def clusters(self, prefix: str) -> dict[str, str]:
        """Return the recorded clusters and their status as SkyPilot believes (INIT, UP, STOPPED)."""
        sky = self._sky()
        with _errors_named("clusters"):
            records = sky.get(sky.status(refresh=sky.StatusRefreshMode.NONE))
        return {record.name: record.status.value for record in records if record.name.startswith(prefix)}

    def login(self, name: str) -> SkyLogin | None:
        """Return the login. None: SkyPilot has no such cluster, or no address yet."""
        sky = self._sky()
        with _errors_named(f"login of {name}"):
            records = sky.get(sky.status([name], refresh=sky.StatusRefreshMode.NONE, _include_credentials=True))
        if not records or records[0].handle is None:
            return None
        handle, credentials = records[0].handle, records[0].credentials or {}
        external = handle.cached_external_ips or []
        internal = handle.cached_internal_ips or []
        key = credentials.get("ssh_private_key_content") or text_of(credentials.get("ssh_private_key"))
        if not external or not internal or not key:
            return None
        return SkyLogin(host=external[0], user=credentials["ssh_user"], private_key=key, address=internal[0])

    def cancel(self, request: str) -> None:
        """Cancel a launch. VMs that the launch already started stay and must be terminated."""
        sky = self._sky()
        with _errors_named("cancel"):
            sky.get(sky.api_cancel([request], silent=True))

    def down(self, name: str) -> None:
        """Terminate a cluster and remove its record. Idempotent. Blocks as long as the cloud takes (10 s and more)."""
        sky = self._sky()
        with _errors_named(f"down of {name}"):
            try:
                sky.get(sky.down(name, purge=True))
            except (ValueError, sky.exceptions.ClusterDoesNotExist):
                return

    def rearm(self, name: str, minutes: int) -> None:
        """Set the VM to terminate itself after `minutes` from now, whatever work runs, unless set again.

        A missing cluster is not an error: the VM needs no timer, and the cloud will report the VM gone.
        """
        sky = self._sky()
        with _errors_named(f"autostop of {name}"):
            try:
                sky.get(sky.autostop(name, minutes, down=True, wait_for=_wait_for_nothing()))
            except (sky.exceptions.ClusterDoesNotExist, sky.exceptions.ClusterNotUpError) as error:
                log.info("%s has no timer of SkyPilot's: %s", name, ANSI.sub("", str(error)))

    def _sky(self) -> Any:
        """Import the SDK. The first call starts an API server if none runs, with this process's environment."""
        for name, value in SERVER_ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        if not Path("~/.sky/plugins.yaml").expanduser().exists():
            os.environ.setdefault(PLUGINS, str(Path(__file__).with_name("sky_plugins.yaml")))
        try:
            import sky
        except ModuleNotFoundError:
            raise Failure(
                f"SkyPilot is not installed, and clouds are reached with it; `{install_command('sky')}`"
            ) from None
        return sky

    def _outcome(self, request: str) -> Outcome:
        sky = self._sky()
        try:
            sky.get(request)
        except sky.exceptions.RequestCancelled:
            return Outcome(failed=Failed.CANCELLED, text="its launch was cancelled")
        except Exception as error:  # the server may return an exception of any type
            history = [str(failover) for failover in getattr(error, "failover_history", [])]
            log = self._log(request)
            return outcome_of("\n".join([type(error).__name__, str(error), *history]), log)
        return Outcome()

    def _log(self, request: str) -> str:
        sky = self._sky()
        text = io.StringIO()
        with contextlib.suppress(Exception):  # evidence is optional
            sky.stream_and_get(request, follow=False, output_stream=text)
        return ANSI.sub("", text.getvalue())


def _is_over(status: str) -> bool:
    return status.rpartition(".")[2] in ("SUCCEEDED", "FAILED", "CANCELLED")


def _wait_for_nothing() -> Any:
    from sky.skylet import autostop_lib

    return autostop_lib.AutostopWaitFor.NONE


def _start_unless_it_answers() -> None:
    """Start the API server unless a server answers. Call before listing requests.

    SkyPilot's list call takes any server process on this machine for ours and then reaches none.
    """
    from sky.server import common

    try:
        common.check_server_healthy_or_start_fn()
    except RuntimeError as error:  # a frozen server keeps the port
        raise SkyUnreachable(f"SkyPilot's API server neither answers nor starts ({error})") from None


def _listens(url: str) -> bool:
    """Return whether the port is taken. A frozen server also keeps the port."""
    parts = urlsplit(url)
    try:
        socket.create_connection((parts.hostname or "127.0.0.1", parts.port or 80), timeout=5.0).close()
    except ConnectionRefusedError:
        return False
    except OSError:
        return True
    return True


def is_node_of(cluster: str, run: str) -> bool:
    """Return whether the SkyPilot cluster is a node of the run. A user may have other clusters with the same prefix."""
    return re.fullmatch(rf"{re.escape(run)}-[a-z0-9-]+-g\d+", cluster) is not None


@contextlib.contextmanager
def _errors_named(operation: str) -> Iterator[None]:
    """Raise SkyUnreachable with our text if the server does not answer."""
    import requests
    from sky import exceptions

    try:
        yield
    except (
        requests.exceptions.RequestException,
        exceptions.ApiServerConnectionError,
        exceptions.ServerTemporarilyUnavailableError,
        exceptions.RequestInterruptedError,
        ConnectionError,
    ) as error:
        raise SkyUnreachable(
            f"{operation}: SkyPilot's API server did not answer ({error}); it is asked again"
        ) from None
