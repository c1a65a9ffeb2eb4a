"""An unfinished run keeps a controller despite a full disk, a locked ledger and a killed controller."""

import contextlib
import errno
import itertools
import os
import plistlib
import signal
import sys
from pathlib import Path

import psutil
import pytest
from click.testing import CliRunner
from sqlalchemy.exc import OperationalError

from launcher.cli.launch import launch
from launcher.cli.ls import ls
from launcher.cli.status import status
from launcher.controller.run_process import LONGEST_PAUSE_SECONDS, run_controller
from launcher.job.schema import Job
from launcher.job.sections import Logging, Notifications, WandbLogging
from launcher.ledger.models import ControllerLease
from launcher.provision.local.provisioner import LocalProvisioner
from launcher.runs import runs, service
from launcher.runs.runs import bring_down, request_stop, still_running
from launcher.runs.service import (
    NoService,
    check_service,
    kept_variables,
    launchd_agent,
    remove_service,
    service_file,
    start_service,
)
from launcher.runs.views import is_controlled, run_view
from launcher.storage.stores import StoreError
from tests.launcher.cluster.stage import FAKE_AGENT, ledger, made_run, wait_until
from tests.launcher.printed import printed

CONTROLLED = (sys.executable, str(Path(__file__).parent / "controlled.py"))
FAKE_SYSTEMCTL = Path(__file__).parent / "fake_systemctl.py"


@pytest.fixture
def sessions(home, monkeypatch):
    monkeypatch.setattr(runs, "CONTROLLER", CONTROLLED)
    return ledger(home)


@pytest.fixture
def systemctl(home, monkeypatch):
    """Put a fake systemctl on PATH, and return the folder where it records its calls."""
    (home / "bin").mkdir()
    script = home / "bin" / "systemctl"
    script.write_text(f"#!{sys.executable}\n{FAKE_SYSTEMCTL.read_text()}")
    script.chmod(0o700)
    monkeypatch.setenv("PATH", f"{home / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(home / "config"))
    monkeypatch.setenv("SPOTRL_CONFIG", str(home / "config.yaml"))
    for key in service.ACCESS_KEYS:
        monkeypatch.delenv(key, raising=False)
    yield home
    if (home / "pid").exists() and psutil.pid_exists(pid := int((home / "pid").read_text())):
        for process in [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()


def calls(folder: Path) -> list[str]:
    return (folder / "calls").read_text().splitlines()


def controller_pid(sessions, run) -> int:
    with sessions() as session:
        lease = session.get(ControllerLease, run.id)
        return 0 if lease is None else lease.pid


# --- lasting errors -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "trouble",
    [
        OSError(errno.ENOSPC, "No space left on device"),
        OperationalError("INSERT", {}, Exception("database is locked")),
        StoreError("the bucket does not answer"),
    ],
    ids=["full disk", "locked ledger", "bucket away"],
)
def test_a_controller_retries_without_limit_with_growing_pauses(sessions, trouble):
    run = made_run(sessions, spot=0, iterations=1000)
    pauses: list[float] = []

    class Troubled(LocalProvisioner):
        def observe(self):
            if len(pauses) < 60:
                raise trouble
            return super().observe()

    provisioner = Troubled(Path(run.folder), run.clock, None, FAKE_AGENT)
    request_stop(sessions, run.name)
    run_controller(sessions, run.name, provisioner=provisioner, sleep=pauses.append)
    assert run_view(sessions, run.name).status == "stopped"
    growing = pauses[:60]
    assert all(later >= 1.5 * earlier for earlier, later in itertools.pairwise(growing[:7]))
    assert LONGEST_PAUSE_SECONDS - 1 < min(growing[10:]) <= max(growing) <= LONGEST_PAUSE_SECONDS


def test_ls_and_status_show_a_missing_controller_and_how_to_start_one(sessions):
    run = made_run(sessions, spot=0, iterations=1000)
    for command, arguments in ((ls, []), (status, [run.name])):
        shown = CliRunner().invoke(command, arguments, obj=sessions, standalone_mode=False).output
        assert "no controller" in shown
        assert f"spotrl resume {run.name}" in shown
    request_stop(sessions, run.name)
    runs.start_controller(sessions, run.name)
    wait_until(lambda: not still_running(sessions, run.name))
    assert "no controller" not in CliRunner().invoke(ls, [], obj=sessions, standalone_mode=False).output


# --- the service ----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_service_restarts_a_controller_that_was_killed(sessions, systemctl):
    run = made_run(sessions, spot=0, iterations=1000)
    file = start_service(sessions, run.name)
    assert file == systemctl / "config" / "systemd" / "user" / "spotrl-demo.service"
    assert calls(systemctl) == ["--user daemon-reload", "--user enable --now spotrl-demo.service"]
    first = controller_pid(sessions, run)
    os.kill(first, signal.SIGKILL)
    wait_until(lambda: controller_pid(sessions, run) != first and is_controlled(sessions, run.name))
    assert bring_down(sessions, run.name, 120) == []


def test_the_controller_of_a_run_that_is_over_removes_its_service(sessions, systemctl, monkeypatch):
    monkeypatch.setattr(runs, "CONTROLLER", (sys.executable, "-m", "launcher.cli.main", "controller"))
    run = made_run(sessions, max_total=10)  # its trainer exceeds the budget
    file = service_file(run.name)
    start_service(sessions, run.name)
    wait_until(lambda: not file.exists())
    assert run_view(sessions, run.name).status == "stopped"
    assert calls(systemctl)[-1] == "--user disable spotrl-demo.service"


def test_a_service_unit_holds_settings_and_no_secrets(sessions, systemctl, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    monkeypatch.setenv("AWS_PROFILE", 'team "100%"')
    run = made_run(sessions, spot=0, iterations=1000)
    unit = start_service(sessions, run.name).read_text()
    assert "hf_secret" not in unit
    assert r'Environment="AWS_PROFILE=team \"100%%\""' in unit
    assert f'Environment="SPOTRL_HOME={systemctl}"' in unit
    assert "Restart=on-failure" in unit
    assert "KillMode=process" in unit  # the local nodes keep running without the service
    assert bring_down(sessions, run.name, 120) == []
    remove_service(run.name)
    assert not service_file(run.name).exists()


def test_secrets_missing_in_a_service_are_named_before_anything_is_bought(systemctl, monkeypatch):
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "x")
    job = Job(name="demo", iterations=1, secrets=("HF_TOKEN",))
    with pytest.raises(NoService, match=r"HF_TOKEN, AWS_SECRET_ACCESS_KEY.*service\.env"):
        check_service(job, os.environ)
    (systemctl / "service.env").write_text("# mine\nHF_TOKEN=a\nAWS_SECRET_ACCESS_KEY=b\n")
    check_service(job, os.environ)
    online = job.model_copy(
        update={
            "notifications": Notifications(webhook="HOOK"),
            "logging": Logging(wandb=WandbLogging(mode="online", project="p", key="W_KEY")),
        }
    )
    with pytest.raises(NoService, match="have this shell's HOOK, W_KEY, HTTPS_PROXY, and spotrl writes no secret"):
        check_service(online, {"HTTPS_PROXY": "http://me:pass@proxy:3128", "HTTP_PROXY": "http://proxy:3128"})


def test_each_run_has_a_token_that_nobody_guesses_and_a_folder_of_its_owner(sessions):
    made = [made_run(sessions, name=name, spot=0, iterations=1) for name in ("one", "two")]
    tokens = {run.token for run in made}
    assert len(tokens) == 2
    assert min(map(len, tokens)) >= 32
    assert not [token for token in tokens if "one" in token or "two" in token]
    assert [Path(run.folder).stat().st_mode & 0o077 for run in made] == [0, 0]


def test_a_service_is_written_without_any_secret():
    kept = {"PATH": "/bin", "SPOTRL_HOME": "/home/me", "HTTP_PROXY": "http://proxy:3128"}
    secret = {
        "HTTPS_PROXY": "http://me:pass@proxy:3128",
        "SPOTRL_JUDGE": "key",
        "HF_TOKEN": "t",
        "AWS_SESSION_TOKEN": "s",
    }
    assert kept_variables(kept | secret, ["SPOTRL_JUDGE", "HF_TOKEN"]) == kept


@pytest.mark.parametrize(("found", "words"), [("none", "systemctl was not found"), ("broken", "connect to bus")])
def test_a_launch_without_systemd_explains_and_starts_nothing(sessions, systemctl, tmp_path, monkeypatch, found, words):
    (systemctl / "broken").touch()
    if found == "none":
        monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    job = tmp_path / "job.yaml"
    job.write_text("name: demo\niterations: 3\n")
    result = CliRunner().invoke(launch, [str(job), "-y", "--detach", "--service"], obj=sessions, standalone_mode=False)
    assert isinstance(result.exception, NoService)
    assert words in str(result.exception)
    assert "spotrl resume" in str(result.exception)
    assert printed("ls", CliRunner().invoke(ls, ["--json"], obj=sessions, standalone_mode=False).output) == []


def test_a_service_needs_a_detached_launch(sessions, tmp_path):
    result = CliRunner().invoke(launch, [str(tmp_path / "job.yaml"), "--service"], obj=sessions)
    assert "add --detach" in result.output


def test_launchd_restarts_the_controller_and_stops_when_the_run_is_over(systemctl):
    agent = plistlib.loads(launchd_agent("demo", ["python", "controller", "demo"], {"PATH": "/bin"}, Path("c.log")))
    assert agent["ProgramArguments"][-3:] == ["python", "controller", "demo"]
    assert (agent["KeepAlive"], agent["RunAtLoad"]) == ({"SuccessfulExit": False}, True)
    assert service_file("demo", "darwin").name == "spotrl.demo.plist"
