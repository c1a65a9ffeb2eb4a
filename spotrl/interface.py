"""The functions of `import spotrl`. Each calls what the command of the same name calls.

Plans, states, events, metrics and reports are read in this process. `launch`, `resume`, `sample` and `weights` run the
command itself in a process of its own: the run then has the same checks, the same files and the same controller, and no
module of a notebook.
"""

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from sqlalchemy import select
from sqlalchemy.orm import Session, sessionmaker

from engine.events import Evaluated
from launcher.exit_codes import Failure
from launcher.job.load import load_job
from launcher.job.resolved import resolve_checked
from launcher.ledger import models
from launcher.ledger.store import find_run, open_ledger
from launcher.market.offers import current_catalog, read_catalog
from launcher.money import dollars
from launcher.placement.cloud_plan import CloudPlan
from launcher.placement.plan import Plan, plan_local
from launcher.report.build import build_report
from launcher.report.comparison import Comparison, compare_runs
from launcher.report.reached import by_iteration
from launcher.report.values import Report
from launcher.runs.event_lines import EventLine, Seen, new_events
from launcher.runs.runs import bring_down, release_seconds, still_running
from launcher.runs.views import RunView, run_view
from launcher.services.fleets import with_fleet_chosen
from launcher.services.own_prices import as_you_pay
from launcher.services.planning import cloud_plan
from launcher.settings import config_path, home, ledger_path
from launcher.sinks.records import count_records, read_records
from launcher.storage.stores import read_object, run_stores
from spotrl.display import Image, Images, Table
from spotrl.functions import with_names_of_functions

LOOK_SECONDS = 0.5
"""Seconds between two reads of the ledger while a run is followed."""

WITHOUT_CONTROLLER_SECONDS = 60.0
"""Time that `Run.wait` waits for a new controller of a run that lost its own. A service starts one within seconds."""

WRITTEN = "# Written by spotrl from a dictionary; the next dictionary of this name replaces it.\n"

Job = str | Path | Mapping[str, Any]
"""A job: the path of its file, or its fields as a dictionary."""


def plan(job: Job, **settings: Any) -> Plan | CloudPlan:
    """Return the plan of a job: nodes, prices, and on clouds cost, time, savings and alternatives. Buys nothing.

    `job`: the path of a job file, or a dictionary of its fields, which is written to ./NAME.job.yaml: paths in it are
    relative to the working folder. `settings`: fields that replace those of the job, like `infra="aws"`. A dotted field
    is written with two underscores: `budget__max_total="$40"`. A reward may be a function: it is written to a module
    beside the job file, unless it is in one there. Raises Failure if the job is wrong or cannot be planned.
    """
    file, fields = _job_file(job, settings)
    checked = load_job(file, fields, environ=os.environ, user_config=config_path())
    now_ms = time.time_ns() // 1_000_000
    if checked.job.clouds:
        catalog = current_catalog(home() / "catalogs")
        checked, _ = with_fleet_chosen(_ledger(), checked, catalog, now_ms)
        return cloud_plan(_ledger(), resolve_checked(checked), catalog, now_ms)
    resolve_checked(checked)
    return plan_local(
        checked.job, as_you_pay(read_catalog(), checked.job.price_overrides, checked.job.discounts, now_ms)
    )


def launch(job: Job, **settings: Any) -> "Run":
    """Check a job, start its run and return the run. On a cloud this buys nodes, within the job's budget.

    The run has a controller of its own and goes on when this process ends. `job` and `settings`: as of `plan`. Raises
    Failure if a check refuses the job; nothing was started then.
    """
    file, fields = _job_file(job, settings)
    overrides = {field: value for field, value in fields.items() if value is not None}  # as `plan` does
    words = [word for field, value in overrides.items() for word in ("--set", f"{field}={_written(value)}")]
    answer = _command("launch", str(file), *words, "--yes", "--detach", "--json")
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

    def wait(self, progress: bool = True) -> RunView:
        """Wait until the run is over and its nodes are gone, and return its state; look at `status` and `reason`.

        `progress`: print a line about iteration, score and dollars. In a terminal or a notebook it is always the same
        line. An interrupt ends the waiting alone: the run goes on. Raises Failure if the run has no controller and none
        comes.
        """
        sessions, shown = _ledger(), ""
        end = "\r" if sys.stdout.isatty() or "ipykernel" in sys.modules else "\n"
        controlled_at = time.monotonic()
        while True:
            is_over = not still_running(sessions, self.name)
            view = run_view(sessions, self.name)
            text = _progress_line(view)
            if progress and text != shown:
                print(text.ljust(len(shown)) if end == "\r" else text, end=end, flush=True)
                shown = text
            if is_over:
                if progress and end == "\r":
                    print()
                return view
            if not view.lacks_controller:
                controlled_at = time.monotonic()
            if time.monotonic() - controlled_at > WITHOUT_CONTROLLER_SECONDS:
                raise Failure(f"{self.name} has no controller, and nobody watches its nodes; `run.resume()` starts one")
            time.sleep(LOOK_SECONDS)

    def metrics(self) -> Table:
        """Return one row per iteration: `iteration`, `hours`, `cost/dollars`, rewards, scores, health and seconds.

        Names as in W&B and TensorBoard (docs/logging.md). An iteration that was done again after a lost trainer has the
        values of its last time.
        """
        with _ledger()() as session:
            record = find_run(session, self.name)
            rows: dict[int, dict[str, Any]] = {}
            for entry in read_records(session, record, 0, count_records(session, record), record.clock.now_ms()):
                rows.setdefault(entry.iteration, {"iteration": entry.iteration}).update(entry.values)
        first = ("iteration", "hours", "cost/dollars", "reward/mean")
        return Table(
            {name: row[name] for name in (*first, *sorted(row.keys() - set(first))) if name in row}
            for _, row in sorted(rows.items())
        )

    def images(self, *iterations: int) -> Images:
        """Return the image sheets of evaluations: of these iterations, or of the first and the newest with a sheet.

        A sheet shows the same prompts and seeds at every evaluation. Raises LookupError for an iteration without one.
        """
        with _ledger()() as session:
            record = find_run(session, self.name)
            evaluated = {
                iteration: row.event
                for iteration, row in by_iteration(session, record, Evaluated.KIND).items()
                if row.event.get("pictures")
            }
        metric = self.status().metric
        stores = run_stores(record.infra, record.job.get("store") or {}, record.name, Path(record.folder))
        sheets = Images()
        for iteration in iterations or sorted({*list(evaluated)[:1], *list(evaluated)[-1:]}):
            event = evaluated.get(iteration)
            png = None if event is None else read_object(stores, str(event["pictures"]))
            if event is None or png is None:
                known = ", ".join(map(str, evaluated)) or "none yet"
                raise LookupError(f"{self.name} has no image sheet of iteration {iteration}; it has: {known}")
            score = f", {metric} {event['metrics'][metric]:.3f}" if metric in event["metrics"] else ""
            sheets.append(Image(title=f"iteration {iteration}{score}", png=png))
        return sheets

    def sample(
        self,
        *prompts: str,
        count: int = 1,
        seed: int = 0,
        steps: int | None = None,
        base: bool = False,
        to: str | Path | None = None,
    ) -> Images:
        """Generate images with the trained weights on this machine, as `spotrl sample`, and return them.

        `count`: images per prompt, with seeds from `seed` on. `base`: with the model before training. `to`: their
        folder, by default ./NAME-samples. Raises Failure without weights or engine.
        """
        options = [f"--count={count}", f"--seed={seed}", *([f"--steps={steps}"] if steps is not None else [])]
        folder = [] if to is None else [f"--to={to}"]
        answer = _command("sample", *options, *folder, *["--base"] * base, "--json", "--", self.name, *prompts)
        return Images(
            Image(
                title=f"{drawn['prompt']}, seed {drawn['seed']}",
                png=Path(drawn["file"]).read_bytes(),
                path=Path(drawn["file"]),
            )
            for drawn in answer["pictures"]
        )

    def resume(self, **limits: str | float) -> "Run":
        """Continue the run from its last checkpoint, as `spotrl resume`, and return it.

        `limits`: the command's options, like `max_total="$60"` or `deadline="6h"`. A run that its budget or deadline
        stopped needs a new one. Raises Failure if the run needs no controller.
        """
        options = [f"--{name.replace('_', '-')}={value}" for name, value in limits.items()]
        _command("resume", self.name, *options, "--json")
        return self

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

    def _repr_html_(self) -> str:
        """Return the state of the run as HTML."""
        view = self.status()
        nodes = sum(node.is_live for node in view.nodes)
        facts = {
            "run": view.name,
            "status": f"{view.status} ({view.reason})" if view.reason else view.status,
            "iteration": f"{view.iteration} of {view.iterations}",
            view.metric or "score": "" if view.score is None else f"{view.score:.3f}",
            "spent": dollars(view.spent_micro_usd),
            "nodes": f"{nodes} live, {view.preemptions} preempted",
        }
        rows = "".join(f"<tr><th>{escape(name)}</th><td>{escape(value)}</td></tr>" for name, value in facts.items())
        return f"<table>{rows}</table>"


def _progress_line(view: RunView) -> str:
    score = "" if view.score is None else f"  {view.metric} {view.score:.3f}"
    limit = "" if view.max_total_micro_usd is None else f" of {dollars(view.max_total_micro_usd)}"
    nodes = sum(node.is_live for node in view.nodes)
    return (
        f"{view.name}  {view.status}  iteration {view.iteration}/{view.iterations}{score}  "
        f"{dollars(view.spent_micro_usd)}{limit}  {nodes} nodes"
    )


def _job_file(job: Job, settings: dict[str, Any]) -> tuple[Path, dict[str, Any]]:
    """Return the path of a job's file and the settings by dotted field, with rewards by name.

    Writes the file of a dictionary, and the module of a reward that is a function. Raises Failure for a file that is
    not ours.
    """
    if isinstance(job, Mapping):
        file = Path.cwd() / (re.sub(r"[^\w.-]", "_", str(job.get("name", "run"))) + ".job.yaml")
    else:
        file = Path(job)
    fields = {
        name: with_names_of_functions(value, file.absolute().parent) if name.split(".")[0] == "reward" else value
        for name, value in ((name.replace("__", "."), value) for name, value in settings.items())
    }
    if isinstance(job, Mapping):
        values = {"name": "run", **job}
        if "reward" in values:
            values["reward"] = with_names_of_functions(values["reward"], file.parent)
        if file.exists() and not file.read_text(encoding="utf-8").startswith(WRITTEN):
            raise Failure(f"{file} exists, and spotrl did not write it; give the job another name, or move the file")
        text = json.dumps(values, indent=2, ensure_ascii=False, default=_path_text)
        file.write_text(f"{WRITTEN}{text}\n", encoding="utf-8")
    return file, fields


def _path_text(value: Any) -> str:
    if not isinstance(value, Path):
        raise Failure(
            f"the job holds {value!r}, of type {type(value).__name__}; use text, numbers, lists, dictionaries"
        )
    return str(value)


def _ledger() -> sessionmaker[Session]:
    return open_ledger(ledger_path())


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
