"""`spotrl rm` deletes a run's files, keeps its costs, and refuses a run that may still cost money."""

import os
import shutil
import time
from pathlib import Path

import pytest
from sqlalchemy import select

from launcher.cleanup import removal
from launcher.cli import rm as rm_module
from launcher.cli.main import run
from launcher.controller.lease import take_lease, this_process
from launcher.exit_codes import ExitCode
from launcher.ledger.models import ControllerLease, NodeEvent, Run
from launcher.ledger.store import append_status, find_run, nodes_of, open_ledger, writing
from launcher.sizes import size_text
from tests.launcher.cluster.stage import made_run
from tests.launcher.made_ledger import START_MS, a_long_run
from tests.launcher.printed import printed
from tests.launcher.test_report_cli import a_checkpoint

RUN = "digits-ocr"


@pytest.fixture
def home(tmp_path, monkeypatch):
    """Create a user's spotrl folder with a finished run: all nodes are released and its folder has a log."""
    home = tmp_path / "home"
    monkeypatch.setenv("SPOTRL_HOME", str(home))
    monkeypatch.setenv("SPOTRL_CONFIG", str(tmp_path / "none.yaml"))
    monkeypatch.chdir(tmp_path)
    folder = home / "runs" / RUN
    with writing(open_ledger(home / "ledger.sqlite")) as session:
        job = a_long_run(session, folder=str(folder))
        job.job = {**job.job, "iterations": 42}
        for node in nodes_of(session, job):
            session.add(NodeEvent(node_id=node.id, at_ms=START_MS, kind="released"))
    (folder / "nodes").mkdir(parents=True)
    (folder / "controller.log").write_bytes(b"x" * 2048)
    return home


@pytest.fixture
def sessions(home):
    return open_ledger(home / "ledger.sqlite")


def answer(capsys, *words: str) -> dict:
    """Return the JSON of a successful command."""
    capsys.readouterr()
    assert run([*words, "--json"]) == ExitCode.OK
    return printed(words[0], capsys.readouterr().out)


def refusal(capsys, *words: str) -> str:
    """Return the one sentence of a command that refuses."""
    capsys.readouterr()
    assert run(words) == ExitCode.FAILURE
    printed_text = capsys.readouterr().err
    assert printed_text.startswith("Error: ")
    assert len(printed_text.strip().splitlines()) == 1
    return printed_text


def test_rm_deletes_the_folder_and_the_report_still_says_what_was_spent(home, capsys):
    before = answer(capsys, "report", RUN)["costs"]
    assert before["total"] > 0
    answered = answer(capsys, "rm", RUN, "--yes")
    assert answered == {
        "run": RUN,
        "folder": str(home / "runs" / RUN),
        "bytes": 2048,
        "buckets": [],
        "was_removed": False,
        "spent_micro_usd": before["total"],
        "left_in_buckets": [],
    }
    assert not (home / "runs" / RUN).exists()
    assert answer(capsys, "report", RUN)["costs"] == before
    assert answer(capsys, "status", RUN)["spent_micro_usd"] == before["total"]


def test_a_removed_run_is_listed_only_with_all(home, capsys):
    assert [one["name"] for one in answer(capsys, "ls")] == [RUN]
    answer(capsys, "rm", RUN, "--yes")
    assert answer(capsys, "ls") == []
    assert [(one["name"], one["is_removed"]) for one in answer(capsys, "ls", "--all")] == [(RUN, True)]
    run(["ls"])
    assert capsys.readouterr().out == "1 removed run is hidden; see `spotrl ls --all`\n"
    run(["ls", "--all"])
    assert "finished (removed)" in capsys.readouterr().out


@pytest.mark.parametrize("words", [("logs", RUN), ("resume", RUN), ("pull", RUN), ("ssh", RUN, "trainer")])
def test_a_command_that_needs_the_files_of_a_removed_run_explains_it(home, capsys, words):
    answer(capsys, "rm", RUN, "--yes")
    assert f"{RUN} was removed with `spotrl rm` on 2" in refusal(capsys, *words)
    assert not (home / "runs" / RUN).exists(), "no command makes the folder again"


def test_the_report_of_a_removed_run_notes_that_its_images_are_gone(home, capsys):
    answer(capsys, "rm", RUN, "--yes")
    assert run(["report", RUN]) == ExitCode.OK
    assert "images and logs are gone" in capsys.readouterr().err


def test_the_name_of_a_removed_run_stays_taken(home, sessions, capsys):
    answer(capsys, "rm", RUN, "--yes")
    with pytest.raises(removal.Failure, match=f"there is a run called {RUN}"):
        made_run(sessions, name=RUN)


# --- refusals ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("status", ["planned", "running", "stopping", "draining"])
def test_a_run_that_is_not_over_is_refused(home, sessions, capsys, status):
    with writing(sessions) as session:
        append_status(session, find_run(session, RUN), status, "", START_MS)
    printed_text = refusal(capsys, "rm", RUN, "--yes")
    assert f"{RUN} is {status}" in printed_text
    assert f"`spotrl down {RUN}`" in printed_text
    assert (home / "runs" / RUN / "controller.log").exists()


def test_a_run_with_a_node_that_has_no_end_on_record_is_refused(home, sessions, capsys):
    with writing(sessions) as session:
        trainer = nodes_of(session, find_run(session, RUN))[0]
        [end] = session.scalars(select(NodeEvent).where(NodeEvent.node_id == trainer.id, NodeEvent.kind == "released"))
        session.delete(end)
    printed_text = refusal(capsys, "rm", RUN, "--yes")
    assert "may still cost money: digits-ocr-trainer-g1" in printed_text
    assert f"`spotrl down {RUN}`" in printed_text
    assert "`spotrl reap`" in printed_text
    assert (home / "runs" / RUN / "controller.log").exists()


def test_a_cloud_run_is_not_removed_until_its_controller_has_cleaned_up(home, sessions, capsys):
    with writing(sessions) as session:
        found = find_run(session, RUN)
        found.infra = "aws"
        session.add(ControllerLease(run_id=found.id, holder="1@0", pid=1, epoch=1, expires_wall_ms=5))
    assert "groups and identities of digits-ocr" in refusal(capsys, "rm", RUN, "--yes")
    with writing(sessions) as session:
        session.get(ControllerLease, find_run(session, RUN).id).expires_wall_ms = 0
    answer(capsys, "rm", RUN, "--yes")


def test_a_run_whose_controller_still_writes_is_refused(home, sessions, capsys):
    with sessions() as session:
        found = find_run(session, RUN)
    take_lease(sessions, found, this_process(), os.getpid(), time.time_ns() // 1_000_000)
    assert f"its controller (process {os.getpid()}) still writes" in refusal(capsys, "rm", RUN, "--yes")


def test_rm_asks_first_and_deletes_nothing_without_a_yes(home, capsys, monkeypatch):
    monkeypatch.setattr(rm_module, "is_a_person", lambda: False)
    assert run(["rm", RUN]) == ExitCode.USAGE
    assert "add --yes" in capsys.readouterr().err
    monkeypatch.setattr(rm_module, "is_a_person", lambda: True)
    monkeypatch.setattr("click.termui.visible_prompt_func", lambda *words: "n")
    assert run(["rm", RUN]) == ExitCode.INTERRUPTED
    assert (home / "runs" / RUN / "controller.log").exists()
    assert [one["name"] for one in answer(capsys, "ls")] == [RUN]


# --- interrupted removals and buckets -----------------------------------------------------------------


def test_an_interrupted_removal_is_finished_by_the_next(home, capsys, monkeypatch):
    folder = home / "runs" / RUN

    def is_killed(path: str) -> None:
        Path(path, "controller.log").unlink()
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(removal.shutil, "rmtree", is_killed)
        assert run(["rm", RUN, "--yes"]) == ExitCode.INTERRUPTED
    assert folder.exists()
    assert "was removed" in refusal(capsys, "resume", RUN), "half a folder is never worked in"
    assert answer(capsys, "rm", RUN, "--yes")["was_removed"] is True
    assert not folder.exists()
    assert run(["rm", RUN]) == ExitCode.OK
    assert f"{RUN} was removed before; none of its files are here." in capsys.readouterr().out


def test_files_in_a_bucket_are_kept_named_and_can_still_be_pulled(home, sessions, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("launcher.cli.pull.write_for_diffusers", lambda weights, job: None)
    bucket = tmp_path / "bucket"
    a_checkpoint(bucket / RUN, "l0000-i000001", 1)
    with writing(sessions) as session:
        found: Run = find_run(session, RUN)
        found.infra, found.job = "aws", {**found.job, "store": {"aws": bucket.as_uri(), "gcp": "gs://not-ours"}}
    assert run(["rm", RUN, "--yes"]) == ExitCode.OK
    printed_text = capsys.readouterr().out
    stored = sum(path.stat().st_size for path in bucket.rglob("*") if path.is_file())
    assert f"Left in its bucket: {size_text(stored)}, less than $0.01 a month" in printed_text
    assert f"({bucket.as_uri()}/{RUN}), counted 20" in printed_text
    assert "not-ours" not in printed_text, "the run was never on that cloud"
    assert run(["pull", RUN, "--to", str(tmp_path / "weights")]) == ExitCode.OK
    assert (tmp_path / "weights" / "weights.safetensors").exists()


@pytest.mark.parametrize(
    ("url", "command"),
    [
        ("s3://b/p/demo", "aws s3 rm --recursive s3://b/p/demo/"),
        ("gs://b/demo", "gcloud storage rm --recursive gs://b/demo/"),
    ],
)
def test_the_deletion_of_a_bucket_ends_in_a_slash(url, command):
    """Without the slash, `demo-2` would be deleted too."""
    assert rm_module.deletion(url) == command


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0 bytes"), (1536, "1.5 KiB"), (5 << 20, "5.0 MiB"), (3 << 29, "1.5 GiB")]
)
def test_a_size_is_in_the_largest_unit_that_fits(count, text):
    assert size_text(count) == text


def test_a_copied_ledger_changes_no_files_of_the_first(home, tmp_path, monkeypatch, capsys):
    copy = tmp_path / "copy"
    shutil.copytree(home, copy)
    monkeypatch.setenv("SPOTRL_HOME", str(copy))
    for words in (("rm", RUN, "-y"), ("resume", RUN)):  # a second controller would write into the first one's folders
        assert f"outside of {copy}: this ledger is a copy of another" in refusal(capsys, *words)
    assert (home / "runs" / RUN / "controller.log").exists()
    monkeypatch.setenv("SPOTRL_HOME", str(home))
    assert run(["rm", RUN, "-y"]) == ExitCode.OK
    assert not (home / "runs" / RUN).exists()
