"""Reports about the machine that spotrl runs on: its address, its Google identity, its home folder."""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace

import psutil
import pytest

from launcher.cli.main import run
from launcher.exit_codes import Failure
from launcher.provision.provide import controller_address


@contextmanager
def serving(answers: Mapping[str, tuple[str, str]]) -> Iterator[str]:
    """Serve (content type, text) by the beginning of a path on loopback, and give HOST:PORT."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            path = max((one for one in answers if self.path.startswith(one)), key=len, default=None)
            kind, text = answers[path] if path is not None else ("text/plain", "nothing here")
            self.send_response(404 if path is None else 200)
            self.send_header("Metadata-Flavor", "Google")
            self.send_header("Content-Type", kind)
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, *_: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    try:
        yield f"127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()


# --- this machine's address -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "answer",
    ["<html>Please log in</html>", "", "203.0.113.7, 198.51.100.1", "2001:db8::7", "203.0.113.7/32", "203.0.113.256"],
)
def test_an_answer_that_is_no_ipv4_address_is_refused(monkeypatch, answer):
    with serving({"/": ("text/html", answer)}) as host:
        monkeypatch.setenv("SPOTRL_CHECK_IP_URL", f"http://{host}/")
        with pytest.raises(Failure, match=r"no IPv4 address.*--set ssh_from="):
            controller_address()


def test_an_ipv4_address_is_taken_without_its_line_end(monkeypatch):
    with serving({"/": ("text/plain", " 203.0.113.7\n")}) as host:
        monkeypatch.setenv("SPOTRL_CHECK_IP_URL", f"http://{host}/")
        assert controller_address() == "203.0.113.7"


# --- who owns a run that is launched on a VM of Google Cloud ----------------------------------------------


def owner_on_a_google_vm(folder, email: str) -> subprocess.CompletedProcess[str]:
    """Ask real google-auth on a machine whose metadata service, a fake, names this service account."""
    account = json.dumps({"email": email, "scopes": ["https://www.googleapis.com/auth/cloud-platform"]})
    token = json.dumps({"access_token": "t", "expires_in": 3600, "token_type": "Bearer"})
    metadata = "/computeMetadata/v1/"
    answers = {
        "/": ("text/plain", "ok"),
        f"{metadata}project/project-id": ("text/plain", "a-project"),
        f"{metadata}universe/universe-domain": ("text/plain", "googleapis.com"),
        f"{metadata}instance/service-accounts/": ("application/json", account),
        f"{metadata}instance/service-accounts/default/token": ("application/json", token),
    }
    if email not in ("", "default"):
        answers[f"{metadata}instance/service-accounts/{email}/token"] = ("application/json", token)
    with serving(answers) as host:
        environ = {
            "PATH": os.environ["PATH"],
            "HOME": str(folder),
            "GCE_METADATA_HOST": host,
            "GCE_METADATA_IP": host,
            "GOOGLE_CLOUD_PROJECT": "a-project",
        }
        code = "from launcher.clouds.gce import GceApi; print(GceApi().caller().owner)"
        return subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True, timeout=100)


@pytest.mark.parametrize("name", ["builder", "123-compute"])
def test_a_run_launched_on_a_google_vm_belongs_to_its_service_account(tmp_path, name):
    done = owner_on_a_google_vm(tmp_path, f"{name}@a-project.iam.gserviceaccount.com")
    assert done.stdout.strip() == name, done.stderr


def test_a_google_vm_that_does_not_name_its_account_owns_nothing(tmp_path):
    done = owner_on_a_google_vm(tmp_path, "default")
    assert done.stdout == ""
    assert "did not name the service account" in done.stderr


# --- a home folder that other computers write too ---------------------------------------------------------


@pytest.mark.parametrize("kind", ["nfs", "nfs4", "cifs", "lustre", "fuse.sshfs"])
def test_a_home_folder_on_a_network_file_system_is_refused(monkeypatch, tmp_path, capsys, kind):
    """The mounts are those of a made-up machine: no network file system can be mounted here."""
    mounts = [
        SimpleNamespace(mountpoint="/", fstype="ext4"),
        SimpleNamespace(mountpoint=str(tmp_path / "home"), fstype=kind),
        SimpleNamespace(mountpoint=str(tmp_path / "home/local"), fstype="ext4"),
    ]
    monkeypatch.setattr(psutil, "disk_partitions", lambda all=False: mounts)
    monkeypatch.setenv("SPOTRL_HOME", str(tmp_path / "home/ada/spotrl"))
    assert run(["ls"]) != 0
    error = capsys.readouterr().err
    assert f"network file system ({kind})" in error
    assert "SPOTRL_HOME=" in error
    assert not list(tmp_path.glob("home/ada/spotrl/ledger*"))
    monkeypatch.setenv("SPOTRL_HOME", str(tmp_path / "home/local/spotrl"))
    assert run(["ls"]) == 0
