"""Hosts: one per running instance of either cloud, each a set of namespaces on the router.

A host's first process is its sshd, in its own process namespace: killing that process kills everything on the host at
once. Before that its link goes down, so that no peer sees a closed socket, as when a real instance is preempted.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from tests.fakes.clouds import addresses
from tests.fakes.clouds.image import Image
from tests.fakes.clouds.metadata import Face, serve
from tests.fakes.clouds.network import Allow, Port, Router

BOOT = Path(__file__).resolve().parent / "host" / "boot.sh"
NAMESPACES = ("unshare", "--net", "--mount", "--pid", "--uts", "--ipc", "--fork", "--kill-child")
CA_FILE = "/etc/ssl/certs/ca-certificates.crt"
ENVIRONMENT = {
    "aws": {"AWS_ENDPOINT_URL": addresses.AWS_URL, "AWS_ALLOW_HTTP": "true"},
    "gcp": {},
}
"""Settings of a host that a real instance does not have. Google's names need only a certificate."""
TRUST = ("SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "AWS_CA_BUNDLE", "HTTPLIB2_CA_CERTS")


@dataclass(frozen=True, kw_only=True, slots=True)
class HostSpec:
    """An instance as its cloud describes it."""

    id: str
    cloud: str
    region: str
    zone: str
    name: str
    instance_type: str
    market: str
    labels: tuple[tuple[str, str], ...]
    network: str
    private: str
    public: str
    user: str
    keys: tuple[str, ...]
    rules: tuple[Allow, ...]


@dataclass(kw_only=True)
class Host:
    spec: HostSpec
    link: str
    folder: Path
    process: subprocess.Popen[bytes]
    first: int
    """Pid of the host's first process, as seen from the world."""
    stop_metadata: Callable[[], None]
    frozen: bool = False


@dataclass
class Hosts:
    folder: Path
    image: Image
    router: Router
    face: Callable[[str], Face]
    certificate: Path
    say: Callable[[str], None]
    hosts: dict[str, Host] = field(default_factory=dict)
    counted: int = 0

    def boot(self, spec: HostSpec) -> None:
        began = time.monotonic()
        self.counted += 1
        link = f"host{self.counted}"
        folder = self.folder / link
        folder.mkdir(parents=True)
        name = f"ip-{spec.private.replace('.', '-')}"
        files = {
            "name": name,
            "keys": "".join(f"{key}\n" for key in spec.keys),
            "user": spec.user,
            "environment": "".join(f"{key}={value}\n" for key, value in _environment(spec.cloud).items()),
            "hosts": _hosts_file(spec.cloud, name, spec.private),
        }
        for file, text in files.items():
            (folder / file).write_text(text)
        shutil.copy(self.certificate, folder / "ca.pem")
        with (folder / "log").open("wb") as log:
            process = subprocess.Popen(
                [*NAMESPACES, "bash", str(BOOT), str(folder), str(self.image.layer), str(self.image.wheels)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        first = _child(process)
        self.router.plug(_port(link, spec), first)
        stop = serve(first, self.face(spec.id))
        self.hosts[spec.id] = Host(
            spec=spec, link=link, folder=folder, process=process, first=first, stop_metadata=stop
        )
        self.say(f"host {spec.id} {spec.zone} {spec.public} up in {time.monotonic() - began:.2f} s")

    def end(self, host_id: str) -> None:
        host = self.hosts.pop(host_id)
        self.router.cut(host.link)
        # With its first process everything in the host's process namespace is dead; `unshare` reaps it and ends.
        with contextlib.suppress(ProcessLookupError):
            os.kill(host.first, signal.SIGKILL)
        host.process.wait()
        host.stop_metadata()
        self.router.unplug(host.link)
        threading.Thread(target=shutil.rmtree, args=(host.folder,), kwargs={"ignore_errors": True}).start()
        self.say(f"host {host_id} {host.spec.zone} is dead")

    def freeze(self, host_id: str) -> None:
        """Send SIGSTOP to all processes of the host, until none runs that could start a new one."""
        host = self.hosts[host_id]
        host.frozen = True
        stopped: set[int] = set()
        while fresh := set(processes_of(host.first)) - stopped:
            for pid in fresh:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGSTOP)
            stopped |= fresh

    def thaw(self, host_id: str) -> None:
        host = self.hosts[host_id]
        host.frozen = False
        for pid in processes_of(host.first):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)

    def ports(self) -> dict[str, Port]:
        return {host.spec.id: _port(host.link, host.spec) for host in self.hosts.values()}


def processes_of(first: int) -> list[int]:
    """Return every process in the process namespace of `first`."""
    space = _namespace(first)
    return [int(entry) for entry in os.listdir("/proc") if entry.isdigit() and _namespace(int(entry)) == space]


def _namespace(pid: int) -> str:
    try:
        return os.readlink(f"/proc/{pid}/ns/pid")
    except OSError:
        return ""


def _port(link: str, spec: HostSpec) -> Port:
    return Port(link=link, network=spec.network, private=spec.private, public=spec.public, rules=spec.rules)


def _child(process: subprocess.Popen[bytes]) -> int:
    """Return the process that `unshare` forked into the new namespaces."""
    for _ in range(2000):
        try:
            children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        except FileNotFoundError:
            children = []
        if children:
            return int(children[0])
        if process.poll() is not None:
            break
        time.sleep(0.002)
    raise RuntimeError("a host's namespaces could not be made; its log has the reason")


def _environment(cloud: str) -> dict[str, str]:
    return ENVIRONMENT[cloud] | dict.fromkeys(TRUST, CA_FILE)


def _hosts_file(cloud: str, name: str, private: str) -> str:
    lines = ["127.0.0.1 localhost", f"{private} {name}"]
    if cloud == "gcp":
        lines += [f"{addresses.METADATA} metadata.google.internal metadata"]
    # Nodes of either cloud may get the other's credentials, so the names of both clouds resolve on both.
    return "\n".join([*lines, known_names()]) + "\n"


def known_names() -> str:
    return f"{addresses.API} {addresses.CHECK_IP} {' '.join(addresses.GOOGLE_NAMES)}"
