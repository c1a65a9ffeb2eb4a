"""W&B and MLflow through their own clients. `make test-sinks` runs these in an environment with both."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest
from PIL import Image

from launcher.ledger.store import find_run, open_ledger
from launcher.runs.late_numbers import send_late
from launcher.settings import ledger_path
from launcher.sinks.messages import Open, Record
from launcher.sinks.process import make_sink
from launcher.sinks.records import count_records, read_records
from launcher.sinks.shipper import run_id
from tests.launcher.cluster.stage import made_run, wait_until
from tests.launcher.cluster.wandb_file import read_history

CONTROLLED = [sys.executable, str(Path(__file__).parent / "controlled.py"), "demo"]
ITERATIONS = 12


@pytest.fixture
def mlflow_server(tmp_path):
    """Start MLflow's server on loopback, with a database of its own."""
    pytest.importorskip("mlflow.server")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(port), "--workers", "1"]
    store = ["--backend-store-uri", f"sqlite:///{tmp_path}/server.db", "--artifacts-destination", str(tmp_path / "a")]
    environ = {**os.environ, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}  # else ten more processes
    with (tmp_path / "server.log").open("wb") as log:
        server = subprocess.Popen(
            [*command, *store], stdout=log, stderr=log, start_new_session=True, cwd=tmp_path, env=environ
        )
    url = f"http://127.0.0.1:{port}"
    wait_until(lambda: answers(url), seconds=60.0)
    yield url
    os.killpg(server.pid, signal.SIGKILL)
    server.wait()


def answers(url):
    try:
        return httpx.get(f"{url}/health").is_success
    except httpx.HTTPError:
        return False


@pytest.fixture
def controllers():
    """Start controller processes, and kill those that are left."""
    started = []

    def start():
        started.append(subprocess.Popen(CONTROLLED, start_new_session=True))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait()


def restarted_run(home, monkeypatch, controllers, **logging):
    """Run `demo` with a controller that is killed in the middle and started again. Return the ledger's records."""
    monkeypatch.setenv("FAKE_SECONDS", "1.0")
    sessions = open_ledger(ledger_path())
    run = made_run(sessions, spot=1, iterations=ITERATIONS, factor=600.0, logging=logging)
    first = controllers()
    files = [Path(run.folder) / "logging" / f"{sink}.json" for sink in logging]
    wait_until(lambda: all(file.exists() and '"sent": 0' not in file.read_text() for file in files), seconds=60.0)
    first.kill()
    first.wait()
    with sessions() as session:
        assert count_records(session, run) < 2 * ITERATIONS, "the restart came too late"
    time.sleep(1.5)  # the trainer goes on without a controller
    second = controllers()
    assert second.wait(timeout=120) == 0
    with sessions() as session:
        records = read_records(session, find_run(session, "demo"), 0, 1000, run.clock.now_ms())
    assert len(records) == 2 * ITERATIONS
    (late,) = send_late(sessions, "demo")  # `spotrl sync` opens the finished run again, and sends nothing twice
    is_whole = "wandb" not in logging  # without a key, W&B itself has none
    assert (late.sent, late.known, late.is_whole) == (2 * ITERATIONS, 2 * ITERATIONS, is_whole), late.problem
    return run, records


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_wandb_offline_has_a_whole_run_with_a_restart_of_the_controller(home, monkeypatch, controllers):
    pytest.importorskip("wandb")
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    run, records = restarted_run(home, monkeypatch, controllers, wandb={"project": "team"})
    (file,) = Path(run.folder).glob("logging/wandb/wandb/offline-run-*/*.wandb")  # one folder, for one `wandb sync`
    name, rows = read_history(file)
    assert name == run_id(run)
    assert list(rows) == [record.number for record in records]
    for record in records:
        row = {key: value for key, value in rows[record.number].items() if not key.startswith("_")}
        assert row == pytest.approx({"iteration": record.iteration, **record.values})


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_mlflow_has_a_whole_run_with_a_restart_of_the_controller(home, monkeypatch, controllers, mlflow_server):
    from mlflow import MlflowClient

    run, records = restarted_run(home, monkeypatch, controllers, mlflow={"tracking_uri": mlflow_server})
    client = MlflowClient(tracking_uri=mlflow_server)
    (found,) = client.search_runs([client.get_experiment_by_name("spotrl").experiment_id])
    assert (found.info.status, found.data.tags["spotrl.run"]) == ("FINISHED", run_id(run))
    assert found.data.params["job.iterations"] == str(ITERATIONS)
    numbers = [point.value for point in client.get_metric_history(found.info.run_id, "record")]
    assert numbers == [record.number + 1 for record in records]
    for name in {name for record in records for name in record.values}:
        history = client.get_metric_history(found.info.run_id, name)
        wanted = {(record.iteration, record.at_ms): record.values[name] for record in records if name in record.values}
        assert {(point.step, point.timestamp) for point in history} == set(wanted)
        for point in history:  # two of one step where a node's bill was closed, and its cost rounded, between them
            assert point.value == pytest.approx(wanted[point.step, point.timestamp], abs=2e-6), name


def opened(folder, **settings):
    return Open(
        run_id="demo-1", name="demo", folder=str(folder), settings=settings, job={"iterations": 3}, facts={"seed": "1"}
    )


def with_sheet(folder):
    sheet = folder / "00003.png"
    Image.new("RGB", (8, 8), "red").save(sheet)
    return (Record(number=0, iteration=3, at_ms=1000, values={"evaluation/exact_match": 0.5}, sheet=str(sheet)),)


@pytest.mark.slow
def test_wandb_keeps_the_image_sheet_of_an_evaluation(tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    run = make_sink("wandb")
    where = run.open(opened(tmp_path / "sink", project="team", key="WANDB_API_KEY")).where
    run.add(with_sheet(tmp_path), 1)
    run.close("finished")
    assert len(list(Path(where).glob("files/media/images/*.png"))) == 1


@pytest.mark.slow
def test_mlflow_without_a_server_keeps_records_and_sheets_in_the_folder(tmp_path, monkeypatch):
    pytest.importorskip("mlflow.server")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    run = make_sink("mlflow")
    wanted = opened(tmp_path / "sink", experiment="team")
    assert run.open(wanted).held == 0
    run.add(with_sheet(tmp_path), 1)
    run.close("failed")
    assert make_sink("mlflow").open(wanted).held == 1
    assert [file.name for file in (tmp_path / "sink" / "artifacts").rglob("*.png")] == ["00003.png"]
