"""Opening, migrating, reading and writing the ledger."""

import multiprocessing
import sqlite3
import stat
from pathlib import Path

import pytest
from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import select, text
from sqlalchemy.exc import IntegrityError

from engine.events import EngineStarted, Evaluated, IterationDone, NodeSeen, Progress
from launcher.exit_codes import Failure
from launcher.ledger.left_in_buckets import left_in_buckets
from launcher.ledger.models import Base, BucketSize, ControllerLease, Node, Removal, Run
from launcher.ledger.store import (
    REVISION,
    append_progress,
    append_status,
    current_status,
    find_run,
    open_ledger,
    open_read_only,
    progress_of,
    stamp_of,
    writing,
)


@pytest.fixture
def sessions(tmp_path):
    return open_ledger(tmp_path / "state" / "ledger.sqlite")


def add_run(sessions, name="demo") -> Run:
    run = Run(
        name=name,
        created_ms=0,
        job_yaml="",
        job={},
        plan={},
        job_digest="",
        code_version="",
        lock_digest="",
        seed=0,
        infra="local",
        money_basis="assumed",
        clock_origin_ms=0,
        clock_factor=1.0,
        folder="",
        coordinator_port=1,
        token="",
    )
    with writing(sessions) as session:
        session.add(run)
    return run


def line(event, seq=0, lineage=0) -> Progress:
    return Progress(run="demo", source="trainer", lineage=lineage, seq=seq, at_ms=lineage * 1000 + seq, event=event)


def started(iteration) -> EngineStarted:
    return EngineStarted(iteration=iteration, config_digest="", devices="cpu", versions={})


def done(iteration, reward=0.0) -> IterationDone:
    return IterationDone(
        iteration=iteration,
        reward_mean=reward,
        reward_std=0.0,
        group_std_mean=0.0,
        explored=0,
        manifest_digest="",
        phase_ms={},
        wall_seconds=1.0,
        health={},
    )


def evaluated(iteration, score=0.0) -> Evaluated:
    return Evaluated(iteration=iteration, metrics={"exact_match": score}, prompts=8)


def test_a_new_ledger_is_private_and_sets_its_sqlite_options(sessions, tmp_path):
    path = tmp_path / "state" / "ledger.sqlite"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    with sessions() as session:
        query = session.connection().exec_driver_sql
        assert query("PRAGMA journal_mode").scalar() == "wal"
        assert query("PRAGMA foreign_keys").scalar() == 1
        assert query("PRAGMA synchronous").scalar() == 2  # FULL: each commit waits for the disk
        assert query("PRAGMA busy_timeout").scalar() == 10_000
    with sessions() as session:
        append_status(session, Run(id=999), "planned", "", 0)
        with pytest.raises(IntegrityError, match="FOREIGN KEY"):
            session.commit()


def test_a_readable_ledger_is_made_private_with_its_side_files(tmp_path):
    path = tmp_path / "ledger.sqlite"
    with open_ledger(path)() as session:
        assert session.scalars(select(Run)).all() == []
        beside = [path, path.with_name("ledger.sqlite-wal"), path.with_name("ledger.sqlite-shm")]
        assert all(stat.S_IMODE(file.stat().st_mode) == 0o600 for file in beside)
        for file in beside:
            file.chmod(0o644)
        open_ledger(path)
        assert all(stat.S_IMODE(file.stat().st_mode) == 0o600 for file in beside)


def test_migrations_create_exactly_the_tables_of_the_models(sessions):
    with sessions() as session:
        context = MigrationContext.configure(session.connection())
        assert compare_metadata(context, Base.metadata) == []


def test_opening_a_ledger_expects_the_newest_migration():
    config = Config()
    config.set_main_option("script_location", "launcher.ledger:migrations")
    assert ScriptDirectory.from_config(config).get_current_head() == REVISION


def test_a_ledger_from_before_removals_keeps_its_runs_unremoved(sessions, tmp_path):
    from alembic import command

    add_run(sessions)
    config = Config()
    config.set_main_option("script_location", "launcher.ledger:migrations")
    with sessions() as session:
        config.attributes["connection"] = session.connection()
        command.downgrade(config, "0003")
        session.commit()
    with open_ledger(tmp_path / "state" / "ledger.sqlite")() as session:
        assert session.get(Removal, find_run(session, "demo").id) is None


def test_a_ledger_from_before_bucket_sizes_keeps_its_runs_uncounted(sessions, tmp_path):
    from alembic import command

    run = add_run(sessions)
    with writing(sessions) as session:
        found = find_run(session, "demo")
        found.infra, found.job = "aws", {"store": {"aws": "s3://runs"}}
        session.add(
            BucketSize(run_id=run.id, at_wall_ms=1, url="s3://runs/demo", is_whole=False, region="", problem="")
        )
    config = Config()
    config.set_main_option("script_location", "launcher.ledger:migrations")
    with sessions() as session:
        config.attributes["connection"] = session.connection()
        command.downgrade(config, "0014")
        session.commit()
    with open_ledger(tmp_path / "state" / "ledger.sqlite")() as session:
        [left] = left_in_buckets(session)[run.id]
        assert (left.url, left.counted_ms) == ("s3://runs/demo", None)


def older(sessions):
    """Downgrade the tables to those of an older spotrl, as its controller left them."""
    from alembic import command

    config = Config()
    config.set_main_option("script_location", "launcher.ledger:migrations")
    with sessions() as session:
        config.attributes["connection"] = session.connection()
        command.downgrade(config, "0003")
        session.commit()


def hold(sessions, **lease):
    values = {"holder": "1@1.0", "pid": 1, "epoch": 1, "expires_wall_ms": 1} | lease
    with sessions() as session, session.begin():
        run = find_run(session, "demo")
        run.code_version = "0.0.9"
        session.add(ControllerLease(run_id=run.id, **values))


def test_an_older_ledger_is_not_migrated_while_a_controller_runs(sessions, tmp_path):
    add_run(sessions)
    hold(sessions)
    older(sessions)
    path = tmp_path / "state" / "ledger.sqlite"
    with pytest.raises(Failure, match=r"demo is looked after by .* older spotrl \(0\.0\.9\).*use spotrl 0\.0\.9 until"):
        open_ledger(path, lambda lease: lease.pid == 1)
    tables = "SELECT count(*) FROM sqlite_master WHERE name = 'removal'"
    assert sqlite3.connect(path).execute(tables).fetchone() == (0,)
    with sessions() as session:  # the controller continues, with the columns that it knows
        session.execute(text("INSERT INTO run_status (run_id, at_ms, status, reason) VALUES (1, 1, 'running', '')"))
        session.commit()


def test_an_older_ledger_is_migrated_once_its_controllers_have_ended(sessions, tmp_path):
    add_run(sessions)
    hold(sessions)
    older(sessions)
    with open_ledger(tmp_path / "state" / "ledger.sqlite", lambda _: False)() as session:
        assert session.get(Removal, find_run(session, "demo").id) is None


def test_a_newer_ledger_error_names_the_version_of_its_newest_run(sessions, tmp_path):
    add_run(sessions)
    hold(sessions)  # a running controller of the newer version does not make the ledger older
    with writing(sessions) as session:
        find_run(session, "demo").code_version = "9.9.0"
        session.execute(text("UPDATE alembic_version SET version_num = '9999'"))
    with pytest.raises(Failure, match=r"newer spotrl .*launched by spotrl 9\.9\.0\); use that version"):
        open_ledger(tmp_path / "state" / "ledger.sqlite", lambda _: True)


def test_a_ledger_of_a_newer_version_is_refused_and_unchanged(sessions, tmp_path):
    with writing(sessions) as session:
        session.execute(text("UPDATE alembic_version SET version_num = '9999'"))
    with pytest.raises(Failure, match=r"written by a newer spotrl \(its tables are 9999.*SPOTRL_HOME"):
        open_ledger(tmp_path / "state" / "ledger.sqlite")


def test_every_migration_can_be_undone(sessions, tmp_path):
    from alembic import command

    config = Config()
    config.set_main_option("script_location", "launcher.ledger:migrations")
    with sessions() as session:
        config.attributes["connection"] = session.connection()
        command.downgrade(config, "base")
        session.commit()
    open_ledger(tmp_path / "state" / "ledger.sqlite")
    with sessions() as session:
        assert current_status(session, Run(id=1)) is None


def open_and_write(path: Path, number: int) -> None:
    sessions = open_ledger(path)
    for count in range(20):
        add_run(sessions, f"run-{number}-{count}")


def test_opening_a_ledger_keeps_the_locks_of_other_processes(tmp_path):
    """A process that closes a ledger that others have open must not delete the write-ahead log."""
    path = tmp_path / "ledger.sqlite"
    first = open_ledger(path)
    add_run(first, "one")
    again = open_ledger(path)
    for name in ("two", "three"):
        other = multiprocessing.get_context("spawn").Process(target=_add_run_and_close, args=(path, name))
        other.start()
        other.join()
        assert other.exitcode == 0
        assert path.with_name("ledger.sqlite-wal").exists()
    for sessions in (first, again):
        with sessions() as session:
            assert find_run(session, "three").name == "three"
            assert session.connection().exec_driver_sql("PRAGMA integrity_check").scalar() == "ok"


def _add_run_and_close(path, name):
    sessions = open_ledger(path)
    add_run(sessions, name)
    sessions.kw["bind"].dispose()


def test_processes_may_open_a_new_ledger_at_the_same_moment(tmp_path):
    path = tmp_path / "ledger.sqlite"
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=open_and_write, args=(path, number)) for number in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(120)
    assert [process.exitcode for process in processes] == [0] * 4
    assert sqlite3.connect(path).execute("SELECT count(*) FROM run").fetchone() == (80,)


def test_a_missing_run_names_the_nearest_ones(sessions):
    with sessions() as session, pytest.raises(LookupError, match="the ledger is empty"):
        find_run(session, "demo")
    add_run(sessions, "digits-ocr")
    add_run(sessions, "other")
    with sessions() as session, pytest.raises(LookupError, match="did you mean digits-ocr"):
        find_run(session, "digts")


def test_the_newest_status_counts(sessions):
    run = add_run(sessions)
    with writing(sessions) as session:
        append_status(session, run, "planned", "", 1)
        append_status(session, run, "running", "", 1)
    with sessions() as session:
        status = current_status(session, run)
        assert status is not None
        assert status.status == "running"


def test_a_progress_line_that_is_read_again_is_stored_once(sessions):
    run = add_run(sessions)
    lines = [line(started(0)), line(done(0), seq=1)]
    with writing(sessions) as session:
        assert append_progress(session, run, lines) == 2
        assert append_progress(session, run, [*lines, *lines]) == 0
        assert append_progress(session, run, [line(done(1), seq=2)]) == 1
    with sessions() as session:
        assert [row.event["iteration"] for row in progress_of(session, run, "iteration_done")] == [0, 1]


def test_a_newer_lineage_replaces_the_iterations_that_it_repeats(sessions):
    run = add_run(sessions)
    old = [started(0), done(0, 0.1), done(1, 0.2), done(2, 0.3)]
    new = [started(1), done(1, 0.9)]
    with writing(sessions) as session:
        append_progress(session, run, [line(event, seq) for seq, event in enumerate(old)])
        append_progress(session, run, [line(event, seq, lineage=1) for seq, event in enumerate(new)])
    with sessions() as session:
        kept = [
            (row.event["iteration"], row.event["reward_mean"]) for row in progress_of(session, run, IterationDone.KIND)
        ]
        assert kept == [(0, 0.1), (1, 0.9)]  # iteration 2 was lost and is not repeated yet


def test_a_lost_iteration_does_not_count_until_it_is_repeated(sessions):
    run = add_run(sessions)
    old = [started(0), done(0), done(1), done(2)]
    with writing(sessions) as session:
        append_progress(session, run, [line(event, seq) for seq, event in enumerate(old)])
        append_progress(session, run, [line(started(1), lineage=1)])
    with sessions() as session:
        assert [row.event["iteration"] for row in progress_of(session, run, IterationDone.KIND)] == [0]


def test_an_evaluation_of_the_checkpoint_that_a_run_went_back_to_stays(sessions):
    run = add_run(sessions)
    old = [started(0), evaluated(0, 0.1), evaluated(3, 0.3), evaluated(6, 0.6)]
    with writing(sessions) as session:
        append_progress(session, run, [line(event, seq) for seq, event in enumerate(old)])
        append_progress(session, run, [line(started(3), lineage=1)])
    with sessions() as session:
        assert [row.event["iteration"] for row in progress_of(session, run, Evaluated.KIND)] == [0, 3]


def test_a_late_event_of_an_old_lineage_changes_nothing(sessions):
    run = add_run(sessions)
    with writing(sessions) as session:
        append_progress(session, run, [line(started(1), lineage=1), line(done(1, 0.9), 1, lineage=1)])
        append_progress(session, run, [line(done(1, 0.2), 7)])
    with sessions() as session:
        assert [row.event["reward_mean"] for row in progress_of(session, run, IterationDone.KIND)] == [0.9]


def test_events_without_an_iteration_are_all_stored(sessions):
    run = add_run(sessions)
    seen = [NodeSeen(node="a", worker="0"), NodeSeen(node="a", worker="1")]
    with writing(sessions) as session:
        append_progress(session, run, [line(event, seq) for seq, event in enumerate(seen)])
    with sessions() as session:
        assert len(progress_of(session, run, NodeSeen.KIND)) == 2


def test_writers_wait_for_one_another_from_their_first_read(sessions):
    """Values read in a writing transaction stay valid until it ends."""
    run = add_run(sessions)
    with writing(sessions) as session:
        assert current_status(session, run) is None
        other = sessions()
        other.connection().exec_driver_sql("PRAGMA busy_timeout=1")
        append_status(other, run, "stopping", "", 0)
        with pytest.raises(Exception, match="locked"):
            other.commit()
        other.close()
        append_status(session, run, "running", "", 0)


def test_a_price_below_zero_is_refused(sessions):
    run = add_run(sessions)
    words = ("slot", "role", "market", "cloud", "region", "zone", "instance_type", "accelerator")
    facts = dict.fromkeys(words, "")
    numbers = {
        "generation": 0,
        "gpus": 1,
        "on_demand_micro_usd_per_hour": 1,
        "requested_ms": 0,
        "reserved_micro_usd": 0,
    }
    with (
        pytest.raises(IntegrityError, match="CHECK constraint failed: micro_usd_per_hour >= 0"),
        writing(sessions) as session,
    ):
        session.add(
            Node(
                run_id=run.id,
                name="n",
                micro_usd_per_hour=-1,
                price_source="",
                price_observed_at="",
                **facts,
                **numbers,
            )
        )


def test_the_stamp_of_a_ledger_changes_with_every_write(tmp_path):
    path = tmp_path / "a b%41" / "ledger.sqlite"
    sessions = open_ledger(path)
    reading = open_read_only(path)
    before = stamp_of(reading)
    assert before[0][0] > 0
    add_run(sessions)
    assert stamp_of(reading) != before
    same = stamp_of(reading)
    with reading() as session:
        assert session.scalars(select(Run.name)).all() == ["demo"]
    assert stamp_of(reading) == same, "a read changes nothing"
    path.rename(path.with_suffix(".away"))
    assert stamp_of(reading)[0] == (0, 0, 0)
