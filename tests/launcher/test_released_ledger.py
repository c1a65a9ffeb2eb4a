"""A ledger written by a released version stays readable (tests/data/released)."""

import gzip
import sqlite3
from pathlib import Path

import pytest
from click.testing import CliRunner

from launcher.cli.report import report
from launcher.cli.status import status
from launcher.ledger.store import find_run, open_ledger
from tests.launcher.printed import printed

RELEASED = Path(__file__).parents[1] / "data/released"
VERSIONS = sorted(path.parent.name for path in RELEASED.glob("*/ledger.sql.gz"))


@pytest.fixture(params=VERSIONS)
def sessions(request, tmp_path):
    """Open the released ledger with current code."""
    path = tmp_path / "ledger.sqlite"
    with sqlite3.connect(path) as database:
        database.executescript(gzip.decompress((RELEASED / request.param / "ledger.sql.gz").read_bytes()).decode())
    database.close()
    return open_ledger(path)


def output_of(sessions, command):
    answer = CliRunner().invoke(command, ["quickstart", "--json"], obj=sessions)
    assert answer.exit_code == 0, answer.output
    return printed(command.name, answer.output)


def test_every_released_version_has_a_ledger():
    assert sorted(path.name for path in RELEASED.iterdir() if path.is_dir()) == VERSIONS


def test_a_released_ledger_keeps_its_run_and_the_version_that_launched_the_run(sessions):
    with sessions() as session:
        run = find_run(session, "quickstart")
    assert (run.code_version, run.infra, run.seed) == ("0.1.0", "local", 0)
    assert run.job["iterations"] == 45


def test_the_report_of_a_released_ledger_adds_up_its_charges_and_preemptions(sessions):
    found = output_of(sessions, report)
    costs, target = found["costs"], found["target"]
    assert (costs["total"], costs["by_role"]) == (2_366_797, {"trainer": 1_491_467, "rollout": 875_330})
    assert costs["sums_equal"]
    assert (target["reached"], target["confirmed"]["iteration"], target["first"]["iteration"]) == (True, 27, 18)
    assert [lost["node"] for lost in found["preemptions"]] == ["quickstart-spot-0-g0", "quickstart-spot-0-g1"]


def test_the_status_of_a_released_ledger_shows_how_the_run_and_its_nodes_ended(sessions):
    found = output_of(sessions, status)
    assert (found["status"], found["reason"], found["iteration"]) == ("finished", "target", 27)
    assert found["spent_micro_usd"] == 2_366_797
    assert {node["name"]: node["status"] for node in found["nodes"]} == {
        "quickstart-trainer-g0": "gone",
        "quickstart-spot-1-g0": "gone",
        "quickstart-spot-0-g2": "gone",
    }
