"""Copies of a run's numbers: whole, without a double, and without a delay for the run."""

import os
import signal
import sys
import time
from dataclasses import asdict
from pathlib import Path

import pytest

from engine.events import IterationDone, Judged
from launcher.checks.preflight import check_secrets, check_sinks
from launcher.cli import main as cli_main
from launcher.controller.run_process import run_controller
from launcher.exit_codes import ExitCode
from launcher.job.checked import JobError
from launcher.job.load import load_job
from launcher.ledger.models import NodeEvent, ProgressRow
from launcher.ledger.store import append_status, find_run, open_ledger, writing
from launcher.provision.local.provisioner import LocalProvisioner
from launcher.sinks import shipper as shipping
from launcher.sinks.connection import Connection
from launcher.sinks.messages import Close, Refused
from launcher.sinks.records import count_records, read_records
from launcher.sinks.shipper import Shipper, end_shippers, run_id
from launcher.sinks.wandb_run import why_offline
from tests.launcher.cluster.file_sink import command, lines_of
from tests.launcher.cluster.stage import FAKE_AGENT, ledger, made_run
from tests.launcher.made_ledger import HOUR_MS, JOB, MINUTE_MS, START_MS, a_run
from tests.launcher.printed import printed


@pytest.fixture
def sessions(tmp_path):
    """Return a ledger with a run `done` of 30 iterations, an evaluation every ten, and two nodes."""
    opened = open_ledger(tmp_path / "ledger.sqlite")
    with opened() as session, session.begin():
        made = a_run(session, "done", job={**JOB, "iterations": 30}, folder=str(tmp_path / "done"))
        made.status("running", 0)
        trainer = made.node("trainer", market="on_demand", rate=1_000_000, up=0, end=HOUR_MS)
        session.add(NodeEvent(node_id=trainer.id, at_ms=START_MS + HOUR_MS, kind="released"))
        spot = made.node("spot-0", rate=300_000, up=0, end=HOUR_MS // 2)
        session.add(NodeEvent(node_id=spot.id, at_ms=START_MS + HOUR_MS // 2, kind="gone"))
        for n in range(30):
            made.trained(n, (n + 1) * MINUTE_MS)
            if n % 10 == 9:
                made.evaluated(n + 1, n / 30, (n + 1) * MINUTE_MS)
        made.status("finished", HOUR_MS, "iterations")
    return opened


def run_of(sessions, name="done"):
    with sessions() as session:
        return find_run(session, name)


def records_of(sessions, first=0, most=1000):
    run = run_of(sessions)
    with sessions() as session:
        return read_records(session, run, first, most, run.clock.now_ms())


def shipper(sessions, path: Path, manner="good", name="done", answer_seconds=20.0):
    run = run_of(sessions, name)
    return Shipper(sessions, name, run.clock, "file", {}, command=command(path, manner), answer_seconds=answer_seconds)


def in_a_moment():
    until = time.monotonic() + 0.3
    return lambda: until


def stored(path):
    return [line for line in lines_of(path) if "number" in line]


# --- records -----------------------------------------------------------------------------------------


def test_a_record_is_the_same_before_and_after_the_end_of_a_node_in_its_millisecond(sessions):
    *_, record = [record for record in records_of(sessions) if record.at_ms == START_MS + HOUR_MS // 2]
    assert (record.values["nodes"], record.values["cost/dollars_per_hour"]) == (2.0, 1.3)


def test_a_record_has_reward_policy_seconds_money_and_nodes(sessions):
    event = IterationDone(
        iteration=30,
        reward_mean=0.75,
        reward_std=0.1,
        group_std_mean=0.2,
        explored=3,
        manifest_digest="m",
        phase_ms={"training": 1500, "rollout": 2500},
        wall_seconds=4.0,
        health={"kl": 0.01, "clip_share": 0.2, "gradient_norm": 1.5, "staleness": 1.0},
        scores={"aesthetic": 5.5},
    )
    paid = Judged(worker="w", calls=((1, 1, 500_000),))
    with writing(sessions) as session:
        for seq, (kind, body) in enumerate([(Judged.KIND, asdict(paid)), (IterationDone.KIND, asdict(event))]):
            session.add(
                ProgressRow(
                    run_id=run_of(sessions).id,
                    source="trainer",
                    lineage=1,
                    seq=1000 + seq,
                    at_ms=START_MS + 45 * MINUTE_MS,
                    kind=kind,
                    event=body,
                )
            )
    (record,) = records_of(sessions, first=33)
    assert (record.number, record.iteration, record.at_ms) == (33, 30, START_MS + 45 * MINUTE_MS)
    # 45 minutes of the trainer at $1/h, 30 of the spot node at $0.30/h, and a paid judge.
    assert record.values == {
        "reward/mean": 0.75,
        "reward/std": 0.1,
        "reward/group_std": 0.2,
        "rollouts/aesthetic": 5.5,
        "explored": 3.0,
        "health/kl": 0.01,
        "health/clip_share": 0.2,
        "health/gradient_norm": 1.5,
        "health/staleness": 1.0,
        "seconds/training": 1.5,
        "seconds/rollout": 2.5,
        "cost/dollars": pytest.approx(0.75 + 0.15 + 0.5),
        "cost/dollars_per_hour": 1.0,
        "nodes": 1.0,
        "hours": 0.75,
        "lineage": 1.0,
    }


def test_record_n_is_the_same_row_at_every_call(sessions):
    whole = records_of(sessions)
    assert [record.number for record in whole] == list(range(33))
    assert records_of(sessions, first=9, most=3) == whole[9:12]
    evaluation = whole[10]
    assert (evaluation.iteration, evaluation.values["evaluation/exact_match"]) == (10, pytest.approx(0.3))
    assert records_of(sessions, first=33) == []


# --- sending -----------------------------------------------------------------------------------------


def test_a_sink_gets_every_record_once_also_after_a_restart(sessions, tmp_path):
    path = tmp_path / "sink.jsonl"
    with sessions() as session, session.begin():
        run = find_run(session, "done")
        run.job = {**run.job, "logging": {"mlflow": {"tracking_uri": "https://me:hunter2@tracking/x"}}}
    shipper(sessions, path).look()
    one = stored(path)
    assert [line["number"] for line in one] == list(range(33))
    assert "https://***@tracking/x" in path.read_text()
    assert "hunter2" not in path.read_text(), "a sink shows the job to others"
    again = shipper(sessions, path)
    again.look()
    again.look()
    assert stored(path) == one
    opened = {line["open"] for line in lines_of(path) if "open" in line}
    assert opened == {run_id(run_of(sessions))}


def test_an_answer_that_is_lost_leaves_neither_a_gap_nor_a_double(sessions, tmp_path, caplog):
    path = tmp_path / "sink.jsonl"
    one = shipper(sessions, path, "lost-answer")
    one.look()
    assert len(stored(path)) == 20  # stored, and the controller does not know it
    assert "its process ended with 3" in caplog.text
    one.look()
    assert [line["number"] for line in stored(path)] == list(range(33))


def test_a_path_of_a_sink_is_relative_to_the_job_file(tmp_path, monkeypatch):
    (tmp_path / "jobs").mkdir()
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    writes = [sys.executable, "-P", "-c", "open('written', 'w')"]
    for folder, written in (("jobs", "jobs"), ("gone", "elsewhere")):
        connection = Connection(writes, tmp_path / "sink.log", tmp_path / folder)
        assert isinstance(connection.ask(Close(state="finished"), until=lambda: time.monotonic() + 60), Refused)
        assert [path.name for path in (tmp_path / written).iterdir()] == ["written"]
        assert (tmp_path / "jobs" / "written").exists()


@pytest.mark.parametrize("manner", ["silent", "dead", "full"])
def test_a_sink_that_is_frozen_dead_or_full_ends_in_time_and_says_so(sessions, tmp_path, manner, caplog):
    path = tmp_path / "sink.jsonl"
    one = shipper(sessions, path, manner)
    one.start()
    began = time.monotonic()
    end_shippers([one], 1.0 if manner == "silent" else 60.0)
    assert time.monotonic() - began < 75.0
    assert "file has 0 of the 33 records of done" in caplog.text
    found = {"silent": "no answer within", "dead": "its process ended with 1", "full": "no space left"}[manner]
    assert found in caplog.text
    assert found in (tmp_path / "done" / "logging" / "file.json").read_text()


def test_a_frozen_process_is_ended_with_its_children(tmp_path):
    connection = Connection(command(tmp_path / "sink.jsonl", "good"), tmp_path / "sink.log")
    os.kill(connection.pid, signal.SIGSTOP)
    answer = connection.ask(Close(state="finished"), until=in_a_moment())
    assert isinstance(answer, Refused)
    assert "no answer within" in answer.text
    assert not Path(f"/proc/{connection.pid}").exists()


def test_a_question_larger_than_the_pipe_to_a_frozen_process_times_out(tmp_path, sessions):
    connection = Connection(command(tmp_path / "sink.jsonl", "good"), tmp_path / "sink.log")
    os.kill(connection.pid, signal.SIGSTOP)
    large = shipping.Records(records=tuple(records_of(sessions) * 10), known=330)
    assert len(large.model_dump_json()) > 1 << 16
    assert "no answer within" in connection.ask(large, until=in_a_moment()).text


# --- after the end ------------------------------------------------------------------------------------


@pytest.fixture
def over(tmp_path, monkeypatch, capsys):
    """Return a function that runs `spotrl sync done` and returns its exit code and its JSON or error."""
    monkeypatch.setenv("SPOTRL_HOME", str(tmp_path))
    monkeypatch.setenv("SPOTRL_CONFIG", str(tmp_path / "none.yaml"))
    monkeypatch.setattr(shipping, "command_of", lambda sink: command(tmp_path / "sink.jsonl", "full"))

    def sync():
        capsys.readouterr()
        code = cli_main.run(["sync", "done", "--json"])
        out = capsys.readouterr()
        return code, printed("sync", out.out) if out.out.startswith('{"run"') else out.out + out.err

    return sync


def with_sink(sessions, **logging):
    with writing(sessions) as session:
        run = find_run(session, "done")
        run.job = {**run.job, "logging": logging}


def test_sync_sends_what_a_sink_that_was_down_lacks(sessions, tmp_path, over):
    with_sink(sessions, wandb={})
    code, answer = over()
    (sink,) = answer["sinks"]
    assert (code, sink["sent"], sink["known"], sink["is_whole"]) == (ExitCode.FAILURE, 0, 33, False)
    assert sink["problem"] == "no space left"
    (tmp_path / "sink.free").touch()
    for _ in range(2):  # a second time sends nothing twice
        code, answer = over()
        (sink,) = answer["sinks"]
        assert (code, sink["sent"], sink["is_whole"], sink["problem"]) == (ExitCode.OK, 33, True, "")
        assert [line["number"] for line in stored(tmp_path / "sink.jsonl")] == list(range(33))
    assert lines_of(tmp_path / "sink.jsonl")[-1] == {"close": "finished"}


def test_sync_without_a_key_says_that_the_records_are_in_files_only(sessions, tmp_path, over, monkeypatch, capsys):
    with_sink(sessions, wandb={})
    monkeypatch.setattr(shipping, "command_of", lambda sink: command(tmp_path / "files", "offline"))
    code, answer = over()
    (sink,) = answer["sinks"]
    assert (code, sink["sent"], sink["is_whole"], sink["is_offline"]) == (ExitCode.FAILURE, 33, False, True)
    assert cli_main.run(["sync", "done"]) == ExitCode.FAILURE
    out = capsys.readouterr()
    assert (
        out.out
        == f"wandb was not asked; 33 of the 33 records of done are in files on this machine ({tmp_path}/files)\n"
    )
    assert out.err == "  the key is not set here; export it\n"


def test_sync_to_a_sink_that_never_answers_says_that_its_number_is_unknown(sessions, over, monkeypatch, capsys):
    with_sink(sessions, wandb={})
    monkeypatch.setattr(shipping, "END_SECONDS", 1.0)
    monkeypatch.setattr(shipping, "command_of", lambda sink: [sys.executable, "-c", "raise SystemExit(1)"])
    assert cli_main.run(["sync", "done"]) == ExitCode.FAILURE
    assert capsys.readouterr().out == "wandb has an unknown number of the 33 records of done\n"


def test_a_wandb_run_is_offline_by_the_job_or_for_want_of_a_key():
    folder = Path("/runs/my run/wandb")
    sends = "`wandb sync '/runs/my run/wandb'` sends the files"
    assert why_offline({"mode": "offline", "key": "KEY"}, folder) == f"logging.wandb.mode is offline; {sends}"
    assert why_offline({"key": "KEY"}, folder) == f"KEY is not set here; export it and repeat the command, or {sends}"


def test_sync_refuses_a_run_without_a_sink_or_with_a_sender_or_that_goes_on(sessions, tmp_path, over):
    assert "names no sink" in over()[1]
    with_sink(sessions, wandb={})
    sender = shipping.Shipper(sessions, "done", run_of(sessions).clock, "wandb", {})
    assert sender.becomes_only_sender()
    assert "another process still sends the numbers of done" in over()[1]
    sender.send_all()
    with writing(sessions) as session:
        append_status(session, find_run(session, "done"), "running", "resumed", START_MS + 2 * HOUR_MS)
    code, text = over()
    assert (code, "done is running" in text) == (ExitCode.FAILURE, True)
    assert not stored(tmp_path / "sink.jsonl")


def test_a_new_controller_sends_beside_a_frozen_one(sessions, tmp_path):
    frozen = shipper(sessions, tmp_path / "sink.jsonl")
    new = shipper(sessions, tmp_path / "sink.jsonl")
    assert (frozen.becomes_only_sender(), new.becomes_only_sender()) == (True, False)
    new.look()
    assert len(stored(tmp_path / "sink.jsonl")) == 33


def test_a_folder_that_cannot_be_made_ends_no_controller(sessions, tmp_path, caplog):
    (tmp_path / "done").write_text("no folder")
    one = shipper(sessions, tmp_path / "sink.jsonl")
    one.start()
    end_shippers([one], 20.0)
    assert "records could not be read or sent to file" in caplog.text


# --- a whole run --------------------------------------------------------------------------------------


def test_a_frozen_sink_neither_slows_nor_stops_a_run(home, monkeypatch, caplog):
    monkeypatch.setenv("FAKE_SECONDS", "0.1")
    monkeypatch.setattr(shipping, "LOOK_SECONDS", 0.1)
    monkeypatch.setattr(shipping, "END_SECONDS", 1.0)
    monkeypatch.setattr(shipping, "command_of", lambda sink: command(home / f"{sink}.jsonl", "silent"))
    opened = ledger(home)
    run = made_run(opened, spot=1, iterations=5, factor=3000.0, logging={"wandb": {}, "mlflow": {}})
    run_to_its_end(opened, run)
    with opened() as session:
        assert count_records(session, run) == 10
    assert caplog.text.count("has 0 of the 10 records of demo") == 2


def run_to_its_end(sessions, run):
    nodes = LocalProvisioner(Path(run.folder), run.clock, None, FAKE_AGENT)
    run_controller(sessions, run.name, provisioner=nodes)


# --- the job ------------------------------------------------------------------------------------------


def test_a_job_with_a_sink_that_cannot_work_is_refused_before_it_costs(tmp_path):
    path = tmp_path / "job.yaml"
    path.write_text("logging: {wandb: {mode: online}, mlflow: {experiment: team}}\n")
    checked = load_job(path)
    check_secrets(checked, {"WANDB_API_KEY": "k"})
    with pytest.raises(JobError, match="WANDB_API_KEY is not set here"):
        check_secrets(checked, {})
    check_sinks(checked, lambda name: True)
    with pytest.raises(JobError, match=r"install -e '.*\[mlflow\]'"):
        check_sinks(checked, lambda name: name == "wandb")


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("logging: {wandb: {key: 0123-SECRETPART}}", "write the name only, like WANDB_API_KEY"),
        ("logging: {mlflow: {tracking_uri: 'https://me:SECRETPART@host'}}", "MLFLOW_TRACKING_PASSWORD"),
    ],
)
def test_a_secret_in_the_job_is_refused_and_not_printed(tmp_path, text, found):
    path = tmp_path / "job.yaml"
    path.write_text(text + "\n")
    with pytest.raises(JobError, match=found) as refused:
        load_job(path)
    assert "SECRETPART" not in str(refused.value)
