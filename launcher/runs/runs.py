"""Runs, for commands: create a run, start its controller, request its end, show its state.

A run is a ledger row and a folder. All work is done by the run's controller, a detached process that any of these
functions may start again.
"""

import os
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from hashlib import blake2b
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path

from pydantic import TypeAdapter
from sqlalchemy import select
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.orm import Session, sessionmaker

from engine.config import ModelConfig
from engine.lora_file import check_digest
from engine.model_parts import FolderError
from launcher.controller.lease import is_given_up, is_held
from launcher.decide.facts import FAILING, OVER, Stage
from launcher.exit_codes import Failure
from launcher.job.checked import CheckedJob
from launcher.ledger.models import LOCAL, ControllerLease, Run
from launcher.ledger.node_history import node_records
from launcher.ledger.store import (
    append_status,
    check_kept,
    current_status,
    find_run,
    newest_ms,
    writing,
)
from launcher.placement.plan import Plan
from launcher.provision.local.processes import processes_of
from launcher.provision.local.provisioner import nodes_folder
from launcher.runs.new_limits import UNCHANGED, NewLimits
from launcher.runs.old_code import code_for, remove_unused_code
from launcher.runs.own_code import environment_for
from launcher.runs.own_folder import check_own_folder
from launcher.runs.start_command import origin_of
from launcher.runs.views import is_controlled, status_of
from launcher.settings import runs_folder

PORTS = range(20_000, 32_000)
"""Ports below the system's ephemeral range, so the next trainer finds the previous trainer's port free."""

CONTROLLER = (sys.executable, "-P", "-m", "launcher.cli.main", "controller")
"""Command of a controller's process; the run's name is appended."""

RELEASE_SECONDS, CLOUD_RELEASE_SECONDS = 60.0, 600.0
"""Longest time of a stop. Nodes first commit their work, and a cloud takes minutes to report a VM gone."""

START_SECONDS = 30.0
"""Longest time until a controller takes its lease. A controller imports a few libraries and opens the ledger."""


class NameTaken(Failure):
    """The run's name is already used. A name is used once, because nodes are named after the run."""


class ControllerFailed(Failure):
    """The controller did not start; the controller's log has the reason."""


class NothingToResume(Failure):
    """The run needs no controller."""


def create_run(
    sessions: sessionmaker[Session], checked: CheckedJob, plan: Plan, name: str, command: Sequence[str] = ()
) -> str:
    """Write a new run to the ledger, whole or not at all. `command`: the words that the user typed."""
    origin = origin_of(command, checked.job.model_dump(mode="json"), checked.workdir)
    with writing(sessions) as session:
        now_ms = time.time_ns() // 1_000_000
        run = run_row(session, checked, plan, name, now_ms, runs_folder() / name)
        append_status(session, run, Stage.PLANNED, "", now_ms)
        session.add(origin.row(run, now_ms))
    Path(run.folder).mkdir(parents=True, exist_ok=True, mode=0o700)
    return name


def run_row(session: Session, checked: CheckedJob, plan: Plan, name: str, now_ms: int, folder: Path) -> Run:
    """Add the row of a new run to the ledger, and return it. Raises NameTaken."""
    if session.scalar(select(Run.id).where(Run.name == name)) is not None:
        raise NameTaken(f"there is a run called {name}; choose another name, or `spotrl resume {name}`")
    job = checked.job
    run = Run(
        name=name,
        created_ms=now_ms,
        job_yaml=checked.text,
        job=job.model_dump(mode="json"),
        plan=TypeAdapter(Plan).dump_python(plan, mode="json"),
        job_digest=checked.digest,
        code_version=version("spotrl"),
        lock_digest=blake2b(files("engine").joinpath("versions.lock").read_bytes(), digest_size=16).hexdigest(),
        seed=job.seed,
        infra=job.infra,
        money_basis=plan.money_basis,
        clock_origin_ms=now_ms,
        clock_factor=job.factor,
        max_total_micro_usd=plan.max_total_micro_usd,
        max_hourly_micro_usd=plan.max_hourly_micro_usd,
        target_metric=job.target.metric if job.target is not None else None,
        target_value=job.target.value if job.target is not None else None,
        folder=str(folder),
        workdir=str(checked.workdir),
        deadline_ms=now_ms + job.budget.deadline if job.budget.deadline is not None else None,
        ends_ms=now_ms + job.budget.longest_ms if job.budget.longest_ms is not None else None,
        coordinator_port=_free_port(set(session.scalars(select(Run.coordinator_port)))),
        token=secrets.token_urlsafe(32),
    )
    session.add(run)
    session.flush()
    return run


def start_controller(sessions: sessionmaker[Session], run_name: str, timeout_s: float = START_SECONDS) -> int:
    """Start the run's controller, detached from this process.

    Return the pid once the controller has taken its lease. Raises ControllerFailed after `timeout_s`.
    """
    with sessions() as session:
        run = find_run(session, run_name)
    folder = Path(run.folder)
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    log = folder / "controller.log"
    home = _ledger_file(sessions).parent
    with code_for(home, folder) as code, log.open("ab") as output:
        child = subprocess.Popen(
            [*CONTROLLER, run_name],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env=environment_for(code, {**os.environ, "SPOTRL_HOME": str(home)}),
        )
    until = time.monotonic() + timeout_s
    while time.monotonic() < until:
        with sessions() as session:
            lease = session.get(ControllerLease, run.id)
        if lease is not None and lease.pid == child.pid:
            _remove_old_code(sessions, home, code)
            return child.pid
        if child.poll() is not None:
            break
        time.sleep(0.05)
    tail = log.read_text(errors="replace").strip()[-1500:]
    raise ControllerFailed(f"the controller of {run_name} did not start; the end of {log}:\n{tail}")


def _remove_old_code(sessions: sessionmaker[Session], home: Path, code: Path) -> None:
    """Remove copies that nothing uses. A copy that cannot be removed stays, and hinders no run."""
    with suppress(OSError, SQLAlchemyError), sessions() as session:
        remove_unused_code(session, home, code)


def request_stop(sessions: sessionmaker[Session], run_name: str, reason: str = "asked for by a person") -> None:
    """Request a stop from the controller. A stopping or finished run stays unchanged.

    A run that fails, and waits for a node that is kept, no longer waits.
    """
    with writing(sessions) as session:
        run = find_run(session, run_name)
        status = current_status(session, run)
        is_failing = status is not None and status.status == Stage.DRAINING and status.reason.startswith(FAILING)
        if is_failing and status is not None and any(node.is_kept for node in node_records(session, run)):
            append_status(session, run, Stage.STOPPING, status.reason, run.clock.now_ms())
        elif status is None or Stage(status.status) not in OVER | {Stage.STOPPING, Stage.DRAINING}:
            append_status(session, run, Stage.STOPPING, reason, run.clock.now_ms())


def release_seconds(infra: str) -> float:
    """Return the normal time in seconds for ending a run. A far longer time signals a fault."""
    return RELEASE_SECONDS if infra == "local" else CLOUD_RELEASE_SECONDS


def wait_released(sessions: sessionmaker[Session], run_name: str, timeout_s: float) -> bool:
    """Wait until nothing of the run is left. Return False if nodes or processes may still run after `timeout_s`."""
    until = time.monotonic() + timeout_s
    while still_running(sessions, run_name):
        if time.monotonic() > until:
            return False
        time.sleep(0.1)
    return True


def still_running(sessions: sessionmaker[Session], run_name: str) -> list[str]:
    """Return the names of nodes without a recorded end, and of leftover processes; both may cost money.

    Without either, return a note if a controller has work left, which on clouds continues after the run is over.
    """
    with sessions() as session:
        run = find_run(session, run_name)
        over = Stage(status_of(session, run).status) in OVER
        live = [record.name for record in node_records(session, run) if record.is_live]
        tidy = run.infra == LOCAL or is_given_up(session.get(ControllerLease, run.id))
    strays = [] if live else [f"process {pid}" for pid in running_processes(run)]
    if live or strays:
        return [*live, *strays]
    if not over:
        return [f"{run_name} (no node now; its controller is at work)"]
    return [] if tidy else [f"groups and identities of {run_name} (its controller takes them away)"]


def bring_down(sessions: sessionmaker[Session], run_name: str, timeout_s: float) -> list[str]:
    """Request a stop, ensure a controller carries out the stop, and wait. Return the remaining nodes and processes."""
    request_stop(sessions, run_name)
    until = time.monotonic() + timeout_s
    while True:
        running = still_running(sessions, run_name)
        if not running or time.monotonic() > until:
            return running
        if not is_controlled(sessions, run_name):
            _start_unless_started(sessions, run_name)
        wait_released(sessions, run_name, min(1.0, timeout_s))


def resume_run(
    sessions: sessionmaker[Session], run_name: str, limits: NewLimits = UNCHANGED, command: Sequence[str] = ()
) -> int:
    """Start the controller of a stopped or failed run, or of a run with a dead controller. Return the pid.

    The trainer continues from the newest checkpoint; live nodes are kept. `command`: the words that the user typed.
    Raises LimitTooLow for a spent budget, CopiedLedger for the files of another ledger, and NothingToResume for a new
    budget of judges while a trainer lives, because its coordinator keeps the old one. Raises Failure on the local infra
    if the file of `model.lora` is another one.
    """
    with sessions() as session:
        run = find_run(session, run_name)
        origin = origin_of(command, run.job, run.workdir)
    with writing(sessions) as session:
        run = find_run(session, run_name)
        check_kept(session, run)
        check_own_folder(run)
        lease = session.get(ControllerLease, run.id)
        if run.infra == LOCAL and run.model.lora is not None:
            _check_lora(run.model)
        if lease is not None and is_held(lease):
            text = f"{run_name} has a controller (process {lease.pid}); `spotrl status {run_name}` shows how it goes"
            if limits != UNCHANGED:
                text += f". A running controller keeps its limits; stop it first: `spotrl down {run_name}`"
            raise NothingToResume(text)
        stage = Stage(status_of(session, run).status)
        if stage is Stage.FINISHED and not any(record.is_live for record in node_records(session, run)):
            raise NothingToResume(f"{run_name} is finished; `spotrl report {run_name}` shows what it cost")
        live = [record for record in node_records(session, run) if record.is_live and record.role == "trainer"]
        if limits.max_judges_micro_usd is not None and live:
            raise NothingToResume(
                f"{live[0].name} still runs with the old budget of the judges; stop it first: `spotrl down "
                f"{run_name}`, then resume"
            )
        # A local run's clock stands still without work: what comes now is later than all that was recorded.
        now_ms = max(run.clock.now_ms(), newest_ms(session, run) + 1)
        changes = limits.apply(session, run, now_ms)
        reason = f"resumed: {changes}" if changes else "resumed"
        if stage in (Stage.STOPPED, Stage.FAILED):
            append_status(session, run, Stage.PLANNED, reason, now_ms)
        elif changes and stage in (Stage.PLANNED, Stage.RUNNING):
            append_status(session, run, stage, reason, now_ms)
        session.add(origin.row(run, now_ms))
    return start_controller(sessions, run_name)


def _check_lora(model: ModelConfig) -> None:
    """Raise Failure if `model.lora` is not the file that the run began with. Nodes on clouds read the bucket."""
    try:
        check_digest(Path(model.lora or ""), model.lora_sha256)
    except FolderError as error:
        raise Failure(str(error)) from None


def running_processes(run: Run) -> list[int]:
    """Return every live process of the run's nodes, independent of the ledger."""
    root = nodes_folder(Path(run.folder))
    folders = [path for path in root.iterdir() if path.is_dir()] if root.exists() else []
    return sorted({pid for folder in folders for pid in processes_of(folder)})


def _start_unless_started(sessions: sessionmaker[Session], run_name: str) -> None:
    try:
        start_controller(sessions, run_name)
    except ControllerFailed:
        if not is_controlled(sessions, run_name):  # another process may have started a controller first
            raise


def _free_port(used_ports: set[int]) -> int:
    while True:
        port = PORTS[secrets.randbelow(len(PORTS))]
        if port in used_ports:
            continue
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port


def _ledger_file(sessions: sessionmaker[Session]) -> Path:
    with sessions() as session:
        return Path(str(session.get_bind().engine.url.database)).absolute()
