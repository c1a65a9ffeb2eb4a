"""`World`: the fake clouds, from outside.

    with World().up() as world:
        world.run(["spotrl", "launch", ...])
        world.reclaim("run-spot0-g1", seconds=30, notice=True)

Everything is inside one network namespace; processes started by `run` are in it too, with the addresses, credentials
and certificates of a client of both clouds in their environment and a separate HOME. The promise: when the world is
down, nothing of it is left, not even after a crash: hosts end with the world's process, and processes started by `run`
are found by their namespace and killed.
"""

import contextlib
import ctypes
import importlib.util
import json
import multiprocessing
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from tests.fakes.clouds import addresses, google
from tests.fakes.clouds.hosts import known_names
from tests.fakes.clouds.image import CHECKOUT, SYSTEM_PYTHON, Image, baked, cache_folder

Told = TypeVar("Told")

CLONE_NEWNET, CLONE_NEWNS = 0x40000000, 0x00020000
MS_BIND, MS_REC, MS_PRIVATE = 0x1000, 0x4000, 0x40000
PROGRAMS = ("ip", "mount", "nft", "nsenter", "rsync", "setpriv", "ssh", "sudo", "unshare")
START_S = 60.0

ENTER = """
folder=$1; shift
mount --make-rprivate /
mount --bind "$folder/hosts.client" /etc/hosts
mount --bind "$folder/resolv.conf" /etc/resolv.conf
exec "$@"
"""
GCLOUD = f"""#!/bin/sh
# The few answers of the gcloud program that SkyPilot asks for. GCLOUD_ACCOUNT: who is logged in; empty is nobody.
case "$*" in
  *"auth list"*) echo "${{GCLOUD_ACCOUNT-{google.CLIENT_EMAIL}}}" ;;
  *"services list"*) for name in compute cloudresourcemanager iam tpu storage; do echo $name.googleapis.com; done ;;
  *"config get"*project*|*"config list"*) echo "{addresses.PROJECT}" ;;
  *version*) echo "Google Cloud SDK 500.0.0" ;;
esac
"""


def why_not() -> str | None:
    """Return the reason why no world can run on this computer, or None."""
    if sys.platform != "linux":
        return "network namespaces are Linux's"
    if os.geteuid() != 0:
        return "the fake clouds need root: they make namespaces and mounts"
    missing = [name for name in PROGRAMS if shutil.which(name) is None]
    if not Path("/usr/sbin/sshd").exists():
        missing.append("sshd")
    if missing:
        return (
            f"the fake clouds need {', '.join(missing)}; install them (openssh-server, nftables, iproute2, sudo, rsync)"
        )
    if not SYSTEM_PYTHON.exists():
        return f"hosts run {SYSTEM_PYTHON}, which is not there"
    for module in ("moto", "flask", "flask_cors"):
        if importlib.util.find_spec(module) is None:
            return f"the fake AWS is moto's server, and the Python package {module} is not installed"
    tried = subprocess.run(
        ["unshare", "--net", "--mount", "--pid", "--fork", "sh", "-ec", _TRY], capture_output=True, text=True
    )
    return (
        None if tried.returncode == 0 else f"namespaces, overlays or nftables do not work here: {tried.stderr.strip()}"
    )


_TRY = """
mount --make-rprivate /
place=$(mktemp -d); mount -t tmpfs tmpfs "$place"; mkdir "$place/upper" "$place/work" "$place/root"
mount -t overlay -o "lowerdir=/etc,upperdir=$place/upper,workdir=$place/work" try "$place/root"
ip link add uplink type bridge
nft add table ip try
umount "$place/root"; umount "$place"; rmdir "$place"
"""


SERVER = "tests.fakes.clouds.server"
"""The program that is a world."""


class World:
    """One world. A given `folder` is kept for its logs; otherwise the folder is temporary."""

    def __init__(self, folder: Path | None = None, cache: Path | None = None) -> None:
        self._own = folder is None
        self.folder = Path(tempfile.mkdtemp(prefix="spotrl-world-")) if folder is None else folder.absolute()
        self.cache = cache or cache_folder()
        self._process: subprocess.Popen[bytes] | None = None
        self._undertaker: subprocess.Popen[bytes] | None = None
        self._known: dict[str, Any] = {}

    # --- life

    def up(self, attached: bool = True) -> "World":
        """Start the world. `attached`: it ends with this process, however this process ends."""
        if (reason := why_not()) is not None:
            raise RuntimeError(reason)
        image = baked(self.cache, lambda text: print(f"fake clouds: {text}", file=sys.stderr))
        self.folder.mkdir(parents=True, exist_ok=True)
        self._furnish(image)
        with (self.folder / "server.log").open("ab") as log:
            self._process = subprocess.Popen(
                ["unshare", "--net", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc", sys.executable]
                + ["-m", SERVER, str(self.folder), str(image.layer), str(image.wheels)]
                + (["attached"] if attached else []),
                cwd=CHECKOUT,
                env={"PATH": os.environ["PATH"], "HOME": str(self.folder), "PYTHONPATH": str(CHECKOUT)},
                stdin=subprocess.PIPE if attached else subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        until = time.monotonic() + START_S
        while not (self.folder / "ready").exists():
            if self._process.poll() is not None or time.monotonic() > until:
                self.down(keep=True)
                raise RuntimeError(f"the world did not start:\n{(self.folder / 'server.log').read_text()[-3000:]}")
            time.sleep(0.05)
        children = Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children").read_text().split()
        server = int(children[0])
        facts = {
            "process": self._process.pid,
            "server": server,
            "born": _born(self._process.pid),
            "namespaces": {kind: os.readlink(f"/proc/{server}/ns/{kind}") for kind in ("net", "pid")},
        }
        (self.folder / "world.json").write_text(json.dumps(facts))
        self._known = facts
        if attached:
            # Hosts end with the world's process, but processes started by `run` need another process to end them.
            self._undertaker = subprocess.Popen(
                [sys.executable, "-m", "tests.fakes.clouds", "--bury", str(self.folder)] + ["remove"] * self._own,
                cwd=CHECKOUT,
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        return self

    @classmethod
    def at(cls, folder: Path) -> "World":
        """Return a world that is or was up at this folder."""
        if not (folder / "world.json").exists():
            raise FileNotFoundError(f"there is no world at {folder}; `--up {folder}` makes one")
        return cls(folder)

    def __enter__(self) -> "World":
        return self

    def __exit__(self, _: type[BaseException] | None, __: BaseException | None, ___: TracebackType | None) -> None:
        self.down()

    def down(self, keep: bool | None = None) -> None:
        """End and remove everything. May be called again, and from another process than `up`."""
        with contextlib.suppress(FileNotFoundError):
            facts = self._facts()
            for pid in (facts["server"], facts["process"]):
                if _born(facts["process"]) == facts["born"]:
                    _kill(pid)
        if self._process is not None:
            _kill(self._process.pid)
            self._process.wait()
            if self._process.stdin:
                self._process.stdin.close()
        until = time.monotonic() + 10
        while (left := self._inhabitants()) and time.monotonic() < until:
            for pid in left:
                _kill(pid)
            time.sleep(0.05)
        shutil.rmtree(self.folder / "hosts", ignore_errors=True)
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(_ssh_sockets((self.folder / "home" / ".sky" / "user_hash").read_text()))
        if keep is False or (keep is None and self._own):
            shutil.rmtree(self.folder, ignore_errors=True)
        if self._undertaker is not None:
            _kill(self._undertaker.pid)
            self._undertaker.wait()
            self._undertaker = None

    def _furnish(self, image: Image) -> None:
        home = self.folder / "home"
        for name in ("bin", "hosts", "home/.aws", "home/.sky", "home/.config/gcloud"):
            (self.folder / name).mkdir(parents=True, exist_ok=True)
        for name in ("ready", "control", "namespaces"):
            (self.folder / name).unlink(missing_ok=True)
        (self.folder / "wheels").unlink(missing_ok=True)
        (self.folder / "wheels").symlink_to(image.wheels)
        # SkyPilot reads the wheel that it sends to hosts from here, and the hosts already have it.
        shutil.copytree(image.layer / "home/ubuntu/.sky/wheels", home / ".sky" / "wheels", dirs_exist_ok=True)
        # SkyPilot's SSH control sockets are in /tmp, so their names must differ between worlds.
        (home / ".sky" / "user_hash").write_text(secrets.token_hex(4))
        google.write_certificates(self.folder)
        google.write_service_account(home / "gcp-key.json")
        # A client in this world trusts the real authorities too, for files on this computer.
        system = Path("/etc/ssl/certs/ca-certificates.crt")
        bundle = (system.read_bytes() if system.exists() else b"") + (self.folder / "ca.pem").read_bytes()
        (self.folder / "bundle.pem").write_bytes(bundle)
        (home / ".aws" / "credentials").write_text(
            "[default]\naws_access_key_id = fake\naws_secret_access_key = fake\n"
        )
        (home / ".aws" / "credentials").chmod(0o600)
        (home / ".aws" / "config").write_text("[default]\nregion = us-east-1\n")
        (self.folder / "hosts.client").write_text(f"127.0.0.1 localhost\n{known_names()}\n")
        (self.folder / "resolv.conf").write_text("# nobody answers here\n")
        gcloud = self.folder / "bin" / "gcloud"
        gcloud.write_text(GCLOUD)
        gcloud.chmod(0o755)

    def _facts(self) -> dict[str, Any]:
        if not self._known:
            self._known = json.loads((self.folder / "world.json").read_text())
        return self._known

    # --- processes inside

    def environment(self) -> dict[str, str]:
        """Return a client's environment: only the language comes from the caller's environment."""
        home, bundle = self.folder / "home", str(self.folder / "bundle.pem")
        path = [str(self.folder / "bin"), str(Path(sys.executable).parent)]
        path += ["/usr/local/sbin", "/usr/local/bin", "/usr/sbin", "/usr/bin", "/sbin", "/bin"]
        trusted = ("SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "AWS_CA_BUNDLE", "HTTPLIB2_CA_CERTS")
        return {
            "HOME": str(home),
            "PATH": ":".join(path),
            "LANG": os.environ.get("LANG", "C.UTF-8"),
            "USER": "root",
            "AWS_ENDPOINT_URL": addresses.AWS_URL,
            "AWS_ALLOW_HTTP": "true",
            "AWS_EC2_METADATA_DISABLED": "true",
            "GOOGLE_APPLICATION_CREDENTIALS": str(home / "gcp-key.json"),
            "GOOGLE_CLOUD_PROJECT": addresses.PROJECT,
            "NO_GCE_CHECK": "true",
            # Builds here use the wheels of the hosts, because there is no package index.
            "PIP_NO_INDEX": "1",
            "PIP_FIND_LINKS": str(self.folder / "wheels"),
            "UV_NO_INDEX": "1",
            "UV_FIND_LINKS": str(self.folder / "wheels"),
            "SPOTRL_NODE_LOCK": str(self.folder / "wheels" / "node.lock"),
            "SKYPILOT_DISABLE_USAGE_COLLECTION": "1",
            # A process here that acts as a node must not turn off this computer.
            "SPOTRL_SHUTDOWN": "true",
            **dict.fromkeys(trusted, bundle),
        }

    def entering(self, command: Sequence[str | Path]) -> list[str]:
        """Return the command line that runs a command inside."""
        net = f"/proc/{self._facts()['server']}/ns/net"
        inside = ["nsenter", f"--net={net}", "unshare", "--mount", "sh", "-ec", ENTER, "world", str(self.folder)]
        return [*inside, *(str(part) for part in command)]

    def run(
        self, command: Sequence[str | Path], *, env: Mapping[str, str] | None = None, check: bool = True, **more: Any
    ) -> subprocess.CompletedProcess[str]:
        """Run a command inside as a client; its output is in the result."""
        done = subprocess.run(
            self.entering(command),
            env=self.environment() | dict(env or {}),
            **{"capture_output": True, "text": True, "stdin": subprocess.DEVNULL} | more,
        )
        if check and done.returncode:
            raise RuntimeError(f"{command}: exit code {done.returncode}\n{done.stdout or ''}\n{done.stderr or ''}")
        return done

    def start(
        self, command: Sequence[str | Path], *, env: Mapping[str, str] | None = None, **more: Any
    ) -> subprocess.Popen[str]:
        """Start a command inside as a client, without waiting."""
        return subprocess.Popen(
            self.entering(command), env=self.environment() | dict(env or {}), **{"text": True} | more
        )

    def call(self, function: Callable[[], Told]) -> Told:
        """Run a function inside, in a child of this process, and return its result (or raise its error)."""
        forks = multiprocessing.get_context("fork")
        mine, its = forks.Pipe(duplex=False)

        def child() -> None:
            os.environ.clear()
            os.environ.update(self.environment())
            self._enter()
            try:
                its.send((function(), None))
            except BaseException as error:
                its.send((None, f"{type(error).__name__}: {error}"))

        process = forks.Process(target=child, daemon=True)
        process.start()
        its.close()
        try:
            result, error = mine.recv()
        except EOFError:
            error = "the child ended without an answer"
        process.join()
        if error is not None:
            raise RuntimeError(error)
        return result

    def _enter(self) -> None:
        """Move this process into the world for good, like ENTER without a program."""
        libc = ctypes.CDLL(None, use_errno=True)

        def done(result: int) -> None:
            if result:
                raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))

        net = os.open(f"/proc/{self._facts()['server']}/ns/net", os.O_RDONLY)
        done(libc.setns(net, CLONE_NEWNET))
        done(libc.unshare(CLONE_NEWNS))
        done(libc.mount(b"none", b"/", None, MS_REC | MS_PRIVATE, None))
        for own, place in (("hosts.client", b"/etc/hosts"), ("resolv.conf", b"/etc/resolv.conf")):
            done(libc.mount(str(self.folder / own).encode(), place, None, MS_BIND, None))

    def on(self, node: str, command: Sequence[str], *, root: bool = False, check: bool = True) -> str:
        """Run a command on a host as its login user, and return its output."""
        first = self._outside(self.ask("first", node))
        inside = ["nsenter", f"--target={first}", "--net", "--mount", "--pid", "--uts", "--ipc", "--root", "--wd"]
        who = [] if root else ["setpriv", "--reuid=1000", "--regid=1000", "--init-groups"]
        done = subprocess.run(
            [*inside, "env", "-i", "HOME=/home/ubuntu", "PATH=/usr/local/bin:/usr/sbin:/usr/bin", *who, *command],
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
        )
        if check and done.returncode:
            raise RuntimeError(f"{command} on {node}: exit code {done.returncode}\n{done.stdout}\n{done.stderr}")
        return done.stdout + done.stderr

    def _outside(self, pid: int) -> int:
        """Return a process of the world by its pid outside."""
        space = self._facts()["namespaces"]["pid"]
        for entry in os.listdir("/proc"):
            with contextlib.suppress(OSError):
                if not entry.isdigit():
                    continue
                for line in Path(f"/proc/{entry}/status").read_text().splitlines():
                    if line.startswith("NSpid:"):
                        numbers = [int(number) for number in line.split()[1:]]
                        # Our pid, then the world's, then (for a process on a host) the host's.
                        if len(numbers) == 3 and numbers[1] == pid and numbers[2] == 1 and self._is_ours(numbers[0]):
                            return numbers[0]
        raise LookupError(f"no process {pid} in {space}")

    def _is_ours(self, pid: int) -> bool:
        """Return whether a process is a descendant of this world's server."""
        server = self._facts()["server"]
        while pid > 1:
            if pid == server:
                return True
            pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        return False

    # --- queries and orders; server.py describes each

    def ask(self, order: str, *args: Any, **more: Any) -> Any:
        with socket.socket(socket.AF_UNIX) as line:
            line.settimeout(60)
            # A path may be longer than a socket address allows, so use the folder's descriptor.
            folder = os.open(self.folder, os.O_RDONLY)
            try:
                line.connect(f"/proc/self/fd/{folder}/control")
            finally:
                os.close(folder)
            line.sendall(json.dumps({"order": order, "args": args, "more": more}).encode() + b"\n")
            with line.makefile("rb") as reply:
                answer = json.loads(reply.readline())
        if "error" in answer:
            raise LookupError(answer["error"])
        return answer["answer"]

    def hosts(self) -> dict[str, dict[str, Any]]:
        """Return the running hosts, by the cloud's instance id."""
        return dict(self.ask("all_hosts"))

    def machines(self) -> list[dict[str, Any]]:
        """Return every instance since the start, with its state and reason."""
        return list(self.ask("machines"))

    def inventory(self) -> list[dict[str, Any]]:
        """Return the resources created since the start that still exist: instances, disks, groups, keys, roles, ..."""
        return list(self.ask("inventory"))

    def reclaim(self, node: str, seconds: float = 0, notice: bool = False) -> str:
        """Preempt an instance after this many seconds. `node`: its id, name or label."""
        return str(self.ask("reclaim", node, seconds=seconds, notice=notice))

    def freeze(self, node: str) -> str:
        """Send SIGSTOP to all processes of a host."""
        return str(self.ask("freeze", node))

    def thaw(self, node: str) -> str:
        return str(self.ask("thaw", node))

    def part(self, node: str, other: str) -> None:
        """Let no packet pass between a host and another: a host, `client`, or `apis` (the bucket is one of them)."""
        self.ask("part", node, other)

    def rejoin(self) -> None:
        """Let all packets pass again."""
        self.ask("rejoin")

    def move(self, address: str) -> None:
        """Change the address of the client's computer; `checkip.amazonaws.com` returns it within a second."""
        self.ask("move", address)

    def fault(self, kind: str, where: str = "", **more: Any) -> None:
        """Add a fault (see faults.py): `fault("capacity", "gcp/us-central1", market="spot", seconds=60)`."""
        self.ask("fault", kind, where, **more)

    def clear(self, kind: str = "", where: str = "", run: str = "") -> None:
        """Clear faults: of a kind, under a path, of a run, or all."""
        self.ask("clear", kind, where, run)

    def price(self, where: str, factor: float) -> int:
        """Set spot prices under a path to this multiple of their first value."""
        return int(self.ask("price", where, factor))

    def quota(self, where: str, name: str, value: float) -> None:
        """Set a quota: `quota("aws", "L-3819A6DF", 0)`, `quota("gcp/us-east4", "NVIDIA_L4_GPUS", 0)`."""
        self.ask("quota", where, name, value)

    def quota_lag(self, seconds: float) -> None:
        """Count an instance against quotas for this long after its end; the default is 0."""
        self.ask("quota_lag", seconds)

    def notice(self, seconds: float) -> None:
        """Set the time between notice and end of a preemption that a client orders; AWS gives 120 s, Google 30 s."""
        self.ask("notice", seconds)

    # --- remains

    def leftovers(self) -> dict[str, int]:
        """Return the processes, process namespaces and mounts of all hosts that still exist.

        Network and mount namespaces are not checked: the kernel reuses their numbers at once, perhaps for a client of
        another world. The number of a process namespace is reserved as long as the world is up.
        """
        spaces = set()
        with contextlib.suppress(FileNotFoundError):
            spaces = {json.loads(line)["pid"] for line in (self.folder / "namespaces").read_text().splitlines()}
        found = [
            space
            for pid in _pids()
            if (space := _namespace(pid, "pid")) in spaces and not self._is_of_another_world(pid)
        ]
        mounts = Path("/proc/self/mounts").read_text().count(str(self.folder))
        return {"processes": len(found), "namespaces": len(set(found)), "mounts": mounts}

    def _is_of_another_world(self, pid: int) -> bool:
        """Return whether another world's server started the process: this world's numbers are free once it is down."""
        while pid > 1:
            try:
                command = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
            except OSError:
                return False
            if SERVER in command and str(self.folder) not in command:
                return True
            pid = _parent(pid)
        return False

    def _inhabitants(self) -> list[int]:
        """Return the clients in the world's network namespace. Hosts die with the world's process namespace.

        The namespaces of ended hosts are not searched: their numbers are reused, also by other worlds.
        """
        try:
            space = self._facts()["namespaces"]["net"]
        except FileNotFoundError:
            return []
        return [pid for pid in _pids() if _namespace(pid, "net") == space]


def _ssh_sockets(user_hash: str) -> Path:
    """Return the folder of SkyPilot's SSH sockets."""
    return Path("/tmp", f"sky_ssh_{user_hash}")


def _pids() -> list[int]:
    return [int(entry) for entry in os.listdir("/proc") if entry.isdigit()]


def _namespace(pid: int, kind: str) -> str:
    try:
        return os.readlink(f"/proc/{pid}/ns/{kind}")
    except OSError:
        return ""


def _parent(pid: int) -> int:
    """Return the parent's pid, or 0 if the process is gone."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0


def _born(pid: int) -> str:
    """Return the start time of a process, so that a later process with its pid is not taken for it."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return ""


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
