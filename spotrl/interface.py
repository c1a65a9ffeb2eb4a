"""The functions of `import spotrl`. Each calls what the command of the same name calls.

Plans, states, events and reports are read in this process. `launch` and `weights` run the command itself in a process
of its own: the run then has the same checks, the same files and the same controller, and no module of a notebook.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sqlalchemy import select
from sqlalchemy.orm import Session, sessionmaker

from launcher.exit_codes import Failure
from launcher.job.load import load_job
from launcher.job.resolved import resolve_checked
from launcher.ledger import models
from launcher.ledger.store import find_run, open_ledger
from launcher.market.offers import read_catalog
from launcher.placement.cloud_plan import CloudPlan
from launcher.placement.plan import Plan, plan_local
from launcher.report.build import build_report
from launcher.report.comparison import Comparison, compare_runs
from launcher.report.values import Report
from launcher.runs.event_lines import EventLine, Seen, new_events
from launcher.runs.runs import bring_down, release_seconds, still_running
from launcher.runs.views import RunView, run_view
from launcher.services.own_prices import as_you_pay
from launcher.services.planning import cloud_plan
from launcher.settings import config_path, home, ledger_path

LOOK_SECONDS = 0.5
"""Seconds between two reads of the ledger while events are followed."""


def plan(job: str | Path, **settings: Any) -> Plan | CloudPlan:
    """Return the plan of a job file: nodes, prices, and on clouds cost, time, savings and alternatives. Buys nothing.

    `settings`: fields of the job that replace those of the file, like `infra="aws"`. A dotted field is written with two
    underscores: `budget__max_total="$40"`. Raises Failure if the job is wrong or cannot be planned.
    """
    checked = load_job(Path(job), _fields(settings), environ=os.environ, user_config=config_path())
    resolved = resolve_checked(checked)
    now_ms = time.time_ns() // 1_000_000
    if checked.job.clouds:
        return cloud_plan(_ledger(), resolved, home() / "catalogs", now_ms)
    return plan_local(
        checked.job, as_you_pay(read_catalog(), checked.job.price_overrides, checked.job.discounts, now_ms)
    )


def launch(job: str | Path, **settings: Any) -> "Run":
    """Check a job, start its run and return the run. On a cloud this buys nodes, within the job's budget.

    The run has a controller of its own and goes on when this process ends. `settings`: as of `plan`. Raises Failure if
    a check refuses the job; nothing was started then.
    """
    overrides = {field: value for field, value in _fields(settings).items() if value is not None}  # as `plan` does
    words = [word for field, value in overrides.items() for word in ("--set", f"{field}={_written(value)}")]
    answer = _command("launch", str(job), *words, "--yes", "--detach", "--json")
    return run(str(answer["name"]))


def run(name: str) -> "Run":
    """Return the run of this name. Raises LookupError with the nearest names."""
    sessions = _ledger()
    with sessions() as session:
        return Run(name=find_run(session, name).name)


def runs() -> list["Run"]:
    """Return all runs, newest first."""
    with _ledger()() as session:
        return [Run(name=name) for name in session.scalars(select(models.Run.name).order_by(models.Run.id.desc()))]


def compare(*runs: "Run | str", group_by: Sequence[str] = (), target_reward: float | None = None) -> Comparison:
    """Compare two or more runs, or their names: dollars, hours, scores and jobs, as `spotrl compare`.

    Runs that differ in the seed alone are a group, or those with equal fields `group_by`, like `["algorithm.name"]`.
    Raises Failure if their scores cannot be compared.
    """
    with _ledger()() as session:
        records = [find_run(session, entry.name if isinstance(entry, Run) else entry) for entry in runs]
        if len(records) < 2:
            raise Failure("name two runs or more; `spotrl.runs()` lists them")
        return compare_runs(session, records, group_by, target_reward)


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """A run in the ledger of this machine. Every method reads the ledger anew."""

    name: str

    def status(self) -> RunView:
        """Return the state of the run: progress, score, cost, nodes."""
        return run_view(_ledger(), self.name)

    def events(self, follow: bool = False) -> Iterator[EventLine]:
        """Yield the events of the run, oldest first. `follow`: wait for new ones until the run has ended."""
        sessions, position = _ledger(), Seen()
        while True:
            is_over = not follow or not still_running(sessions, self.name)
            with sessions() as session:
                lines, position = new_events(session, find_run(session, self.name), position)
            yield from lines
            if is_over:
                return
            time.sleep(LOOK_SECONDS)

    def report(self, target_reward: float | None = None) -> Report:
        """Return the report: dollars and hours to the target, costs, preemptions. `target_reward`: another target."""
        with _ledger()() as session:
            record = find_run(session, self.name)
            return build_report(session, record, record.clock.now_ms(), target_reward)

    def weights(self, to: str | Path | None = None) -> Path:
        """Copy the trained weights to a folder and return it. Default: ./NAME-weights. Raises Failure without any."""
        folder = Path(to) if to is not None else Path(f"{self.name}-weights")
        _command("pull", self.name, "--to", str(folder), "--json")
        return folder

    def stop(self) -> list[str]:
        """Stop the run and release its nodes. Return what was still there after the usual time; empty: all is gone."""
        sessions = _ledger()
        with sessions() as session:
            infra = find_run(session, self.name).infra
        return bring_down(sessions, self.name, release_seconds(infra))


def _ledger() -> sessionmaker[Session]:
    return open_ledger(ledger_path())


def _fields(settings: dict[str, Any]) -> dict[str, Any]:
    return {name.replace("__", "."): value for name, value in settings.items()}


def _written(value: Any) -> str:
    """Return a value as a job file may have it: JSON is YAML, and `None` in the text of a Python value is a word."""
    return value if isinstance(value, str) else str(value) if isinstance(value, Path) else json.dumps(value)


def _command(*words: str) -> dict[str, Any]:
    """Run a command of spotrl and return its JSON. Raises Failure with the command's sentence."""
    done = subprocess.run(
        [sys.executable, "-P", "-m", "launcher.cli.main", *words],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parent.parent)},
    )
    last = (done.stdout.strip().splitlines() or ["{}"])[-1]
    try:
        answer = json.loads(last)
    except ValueError:
        answer = {}
    if done.returncode != 0:
        raise Failure(answer.get("error") or done.stderr.strip() or f"`spotrl {words[0]}` ended with {done.returncode}")
    return dict(answer)
