"""A real sshd on loopback for one test, with temporary keys, the current user and no system configuration."""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from getpass import getuser
from pathlib import Path

import psutil

from launcher.provision.sky.node_link import Login
from tests.engine.fleet import free_port
from tests.mutants.process_plugin import inherited

CONFIG = """
Port {port}
ListenAddress {address}
HostKey {folder}/host_key
AuthorizedKeysFile {folder}/user_key.pub
PidFile none
UsePAM no
StrictModes no
PasswordAuthentication no
KbdInteractiveAuthentication no
PermitRootLogin yes
SetEnv {environment}
"""


def why_no_sshd() -> str | None:
    """Return the reason why sshd cannot be started here, or None."""
    missing = [program for program in ("ssh", "ssh-keygen") if shutil.which(program) is None]
    if _sshd() is None:
        missing.append("sshd")
    return f"needs {', '.join(missing)} (package openssh-server)" if missing else None


def _sshd() -> str | None:
    return shutil.which("sshd", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin")


class Sshd:
    """An sshd on one loopback address. `environment`: variables of its sessions, as from /etc/environment."""

    def __init__(
        self, folder: Path, *, address: str = "127.0.0.1", environment: Mapping[str, str] | None = None
    ) -> None:
        folder.mkdir()
        for name in ("host_key", "user_key"):
            subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)], check=True)
        self.login = Login(host=address, user=getuser(), key=folder / "user_key", port=free_port())
        # SPOTRL_SHUTDOWN is set here, so that no node can shut down this computer.
        variables = {"SPOTRL_SHUTDOWN": "true", **inherited(), **(environment or {})}
        text = CONFIG.format(
            port=self.login.port,
            address=address,
            folder=folder,
            environment=" ".join(f'"{name}={value}"' for name, value in variables.items()),
        )
        (folder / "sshd_config").write_text(text)
        self._command = [str(_sshd()), "-D", "-e", "-f", str(folder / "sshd_config")]
        self._log = folder / "sshd.log"
        self.start()

    def start(self) -> None:
        """Start or restart the server."""
        if os.getuid() == 0:
            Path("/run/sshd").mkdir(exist_ok=True)  # sshd started by root needs this folder to be empty
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(self._command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        until = time.monotonic() + 60
        while True:
            try:
                socket.create_connection((self.login.host, self.login.port), timeout=1).close()
                return
            except OSError:
                assert self._process.poll() is None, self._log.read_text()
                assert time.monotonic() < until, self._log.read_text()
                time.sleep(0.02)

    def sessions(self) -> list[psutil.Process]:
        """Return the sshd processes that serve connections, with their children but without detached processes."""
        return [child for child in psutil.Process(self._process.pid).children(recursive=True) if child.is_running()]

    def windows(self) -> list[psutil.Process]:
        return [process for process in self.sessions() if "engine.node.remote_console" in _words_of(process)]

    def cut(self, number: signal.Signals = signal.SIGKILL) -> None:
        """Kill or stop the processes that carry connections; their children stay."""
        for process in self.sessions():
            with contextlib.suppress(psutil.NoSuchProcess):
                if process.name().startswith("sshd"):
                    process.send_signal(number)

    def stop(self) -> None:
        """Stop the server and end its connections."""
        if self._process.poll() is None:
            self.cut()
            self._process.kill()
            self._process.wait()


def _words_of(process: psutil.Process) -> list[str]:
    """Return the command line of a process, or an empty list if the process has ended."""
    try:
        return process.cmdline()
    except psutil.NoSuchProcess:  # a zombie too
        return []


PROXY = """\
import select, socket, sys
with open(sys.argv[1], "a") as log:
    log.write(f"{sys.argv[3]} {sys.argv[4]}\\n")
line = socket.create_connection(("127.0.0.1", int(sys.argv[2])))
while True:
    for one in select.select([line, 0], [], [])[0]:
        data = line.recv(65536) if one is line else sys.stdin.buffer.raw.read(65536)
        if not data:
            sys.exit()
        line.sendall(data) if one == 0 else (sys.stdout.buffer.write(data), sys.stdout.flush())
"""


def through_proxy(login: Login, folder: Path) -> tuple[Login, Path]:
    """Return a login to an unknown host name through a proxy to `login`, and the path of the proxy's log."""
    (folder / "proxy.py").write_text(PROXY)
    log = folder / "proxy.log"
    proxy = f"{sys.executable} {folder / 'proxy.py'} {log} {login.port} %h %p"
    return replace(login, host="node.invalid", port=22, proxy=proxy), log
