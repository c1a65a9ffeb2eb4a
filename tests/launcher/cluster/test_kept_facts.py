"""Facts that a controller may record or must read again: leases, progress and the free first hour."""

import json
from pathlib import Path

import pytest
from sqlalchemy import select
from sqlalchemy.exc import OperationalError

from launcher.controller import recorder
from launcher.controller.controller import Controller
from launcher.controller.lease import renew, take_lease
from launcher.ledger.models import BillingInterval, ProgressRow, Run
from launcher.ledger.store import writing
from launcher.provision.local.provisioner import LocalProvisioner, node_folder
from launcher.runs.runs import request_stop
from launcher.storage.store_lease import LeaseLost
from tests.launcher.cluster.stage import CLOUD_SITES, FAKE_AGENT, dead_pid, ledger, made_run
from tests.launcher.cluster.test_moving import Stage


@pytest.fixture
def sessions(home):
    return ledger(home)


def test_an_older_epoch_of_the_same_holder_has_lost_its_lease(sessions):
    run = made_run(sessions)
    first = take_lease(sessions, run, "host@1", dead_pid(), now_ms=0)
    second = take_lease(sessions, run, "host@1", dead_pid(), now_ms=0)
    with writing(sessions) as session:
        renew(session, second, now_ms=0)
    with pytest.raises(LeaseLost), writing(sessions) as session:
        renew(session, first, now_ms=0)


# --- progress -------------------------------------------------------------------------------------------


def a_controller(sessions, monkeypatch) -> tuple[Controller, Run, Path]:
    """Return a controller with a silent trainer, and the trainer's progress file."""
    monkeypatch.setenv("FAKE_TROUBLE", "deaf")
    run = made_run(sessions, spot=0)
    provisioner = LocalProvisioner(Path(run.folder), run.clock, None, FAKE_AGENT)
    controller = Controller(sessions, run, provisioner, run.clock, "test", dead_pid())
    controller.one_pass()
    file = node_folder(Path(run.folder), "demo-trainer-g0") / "progress" / "trainer.jsonl"
    file.parent.mkdir()
    return controller, run, file


def progress_line(seq: int, run: str = "demo") -> str:
    head = {"run": run, "source": "trainer", "lineage": 0, "at_ms": 1, "kind": "warned", "seq": seq}
    return json.dumps(head | {"event": {"text": run}}) + "\n"


def texts(sessions) -> list[str]:
    with sessions() as session:
        return [row.event["text"] for row in session.scalars(select(ProgressRow))]


def test_progress_of_another_run_is_ignored(sessions, monkeypatch):
    controller, _, file = a_controller(sessions, monkeypatch)
    file.write_text(progress_line(0, run="other") + progress_line(1))
    controller.one_pass()
    assert texts(sessions) == ["demo"]


def test_progress_that_could_not_be_written_is_read_again(sessions, monkeypatch):
    controller, _, file = a_controller(sessions, monkeypatch)
    file.write_text(progress_line(0))
    keep = recorder.append_progress

    def refuse(*_):
        raise OperationalError("INSERT", {}, Exception("database or disk is full"))

    monkeypatch.setattr(recorder, "append_progress", refuse)
    with pytest.raises(OperationalError):
        controller.one_pass()
    monkeypatch.setattr(recorder, "append_progress", keep)
    controller.one_pass()
    assert texts(sessions) == ["demo"]


# --- the free first hour --------------------------------------------------------------------------------


def test_the_first_hour_is_billed_if_we_terminated_the_node(sessions):
    """EC2 may report an interruption of a spot instance that we terminated. It bills such an instance."""
    stage = Stage(sessions, spot=1, sites=(CLOUD_SITES[2],))
    stage.passes(30, step_ms=60_000)
    words = "Server.SpotInstanceTermination: Spot instance termination"
    stage.cloud.release = lambda names: [stage.cloud.end(name, words, reclaimed=True) for name in names]
    request_stop(sessions, stage.run.name)
    stage.passes(5)
    with sessions() as session:
        intervals = session.scalars(select(BillingInterval)).all()
    assert len(intervals) == 2
    assert all(interval.micro_usd > 0 and "first hour" not in interval.basis for interval in intervals)
