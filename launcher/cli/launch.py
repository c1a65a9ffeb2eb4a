"""`spotrl launch`: check the job, show the plan, start the controller, follow it.

The controller is a separate process and manages the run; this command only follows the run. Following may end by
Ctrl-C, a lost terminal or an error. In each case the command prints which nodes still run and how to stop the run.
"""

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import click
from rich.console import Console
from rich.live import Live
from sqlalchemy import select
from sqlalchemy.orm import Session, sessionmaker

from launcher.checks.preflight import ask_engine, preflight
from launcher.checks.ready import check_clouds, check_here, check_job, check_named, check_prices
from launcher.cli.cloud_plan_text import cloud_plan_lines
from launcher.cli.live import ENDED, money_text, panel, plain_line, score_text
from launcher.cli.plan_text import clock_text, header, plan_dict, plan_lines
from launcher.decide.reconcile import bound_of_plan
from launcher.exit_codes import BudgetError, ExitCode, Failure
from launcher.job.checked import CheckedJob, JobError
from launcher.job.load import load_job
from launcher.job.schema import Job, auto_clock_factor
from launcher.ledger.billing import LOCAL
from launcher.ledger.models import Run
from launcher.ledger.store import find_run
from launcher.market.offers import Offer, read_catalog
from launcher.market.own_prices import as_you_pay
from launcher.money import dollars, hourly
from launcher.placement.cloud_plan import CloudPlan, cloud_plan_json
from launcher.placement.plan import Plan, plan_local
from launcher.placement.sharing import check_sp_degree
from launcher.runs.runs import (
    RunView,
    bring_down,
    create_run,
    release_seconds,
    request_stop,
    run_clock,
    run_view,
    running_processes,
    start_controller,
    still_running,
    wait_released,
)
from launcher.runs.service import check_service, start_service
from launcher.runs.start import StartWeights, find_start, send_start
from launcher.services.planning import cloud_plan
from launcher.settings import config_path, home, runs_folder

LOOK_SECONDS = 0.5
"""Seconds between reads of the ledger. A read is one short query on this machine."""

QUIET_SECONDS = 30.0
"""Longest time without a line in a log. A log also gets a line after every change."""

ALONE_SECONDS = 10.0
"""Seconds without a controller until `launch` starts a new controller: the lease has expired without a successor."""

SETTLE_SECONDS = 5.0


@click.command()
@click.argument("job", type=click.Path(path_type=Path))
@click.option("--name", help="Name of the run (default: the job's).")
@click.option("--infra", help="Infrastructure: local (this machine), or the clouds to buy nodes from, like aws,gcp.")
@click.option(
    "--spot",
    type=click.Choice(["auto", "only", "never"]),
    help="Capacity type of the rollout nodes. auto: spot, and on-demand where spot capacity is short. only: "
    "never on-demand. never: always on-demand.",
)
@click.option("--max-total", help="Budget of the run in dollars, like 40 or '$40'.")
@click.option("--max-hourly", help="Limit on the total price of the run's nodes, in dollars per hour, like 8.")
@click.option("--deadline", help="Maximum duration of the run on the run's clock, like 12h30m.")
@click.option("--iterations", type=int, help="Number of trained batches after which the run ends.")
@click.option("--seed", type=int, help="Random seed of the run, an integer of 0 or more.")
@click.option("--runtime", help="Runtime of the workers: local (processes) or ray (actors of one Ray cluster).")
@click.option(
    "--exploration",
    type=click.Choice(["none", "in-path", "stale"]),
    help="Selection of the seeds to train. none: the first seeds. in-path: from candidates with current weights, "
    "all rolled out before training. stale: from candidates that spot nodes try with the previous weights "
    "during training.",
)
@click.option(
    "--set",
    "settings",
    multiple=True,
    metavar="FIELD=VALUE",
    help="Set a field of the job, like checkpoint.every=2. Repeatable.",
)
@click.option(
    "--allow-old-prices",
    is_flag=True,
    help="On clouds: buy even if a price is older than 24 hours (spot) or 30 days (on-demand), or has no known date.",
)
@click.option("-y", "--yes", is_flag=True, help="Skip the confirmation before the start.")
@click.option("--dry-run", is_flag=True, help="Check the job and show the plan; start nothing.")
@click.option("--detach", is_flag=True, help="Start the run, and return without following the run.")
@click.option(
    "--service",
    is_flag=True,
    help="With --detach: restart a crashed controller of the run with systemd (macOS: launchd).",
)
@click.option(
    "--on-exit",
    type=click.Choice(["ask", "keep", "down"]),
    default="ask",
    show_default=True,
    help="Action after Ctrl-C or SIGTERM. keep: leave the run running. down: stop the run and release its "
    "nodes. ask: ask whether to keep or stop the run; without a terminal or after SIGTERM, stop the run.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object at the end. Progress goes to stderr.")
@click.option(
    "--result", type=click.Path(dir_okay=False, path_type=Path), help="Write the run's result to this file, as JSON."
)
@click.option(
    "--html", type=click.Path(dir_okay=False, path_type=Path), help="Write the run's report to this file, as HTML."
)
@click.pass_obj
def launch(
    sessions: sessionmaker[Session],
    job: Path,
    settings: tuple[str, ...],
    allow_old_prices: bool,
    yes: bool,
    dry_run: bool,
    detach: bool,
    service: bool,
    on_exit: str,
    as_json: bool,
    result: Path | None,
    html: Path | None,
    **flags: Any,
) -> int:
    """Check JOB, show its plan, start the run and follow it.

    A separate controller process manages the run, so a run survives a closed terminal. Ctrl-C asks whether to keep or
    stop the run; --on-exit gives the answer in advance.

    \b
    Example:
      spotrl launch quickstart.yaml --dry-run
      spotrl launch quickstart.yaml --max-total 40 --name first-try
      spotrl launch quickstart.yaml -y --on-exit down --json    (in CI)
      spotrl launch qwen_image_ocr.yaml --infra aws,gcp --dry-run
      spotrl launch qwen_image_ocr.yaml --infra aws --max-total 200 -y --detach --service
      spotrl launch job.yaml --infra aws,gcp --max-total 200 --max-hourly 15 --set store.aws=s3://my-bucket/spotrl \\
        --set store.gcp=gs://my-bucket/spotrl
    """
    if detach and (on_exit == "down" or result or html):
        raise click.UsageError("--detach leaves the run alone; it takes neither --on-exit down, --result nor --html")
    if service and not detach:
        raise click.UsageError("--service is for a run that is left alone; add --detach")
    out = Console(stderr=as_json)
    checked = load_job(job, overrides(flags, settings), environ=os.environ, user_config=config_path())
    if not checked.lines:
        raise JobError("it is empty", "`spotrl init` writes one with comments", file=job)
    _check_name_is_free(sessions, checked)
    check_sp_degree(checked)
    if service:
        check_service(checked.job, os.environ)
    weights, weights_file = None, None
    if checked.job.model.start is not None:
        place = click.get_current_context().with_resource(TemporaryDirectory(prefix=".start-", dir=home()))
        weights = find_start(sessions, checked, Path(place))
        weights_file = weights.file
        out.print(f"Starts from {weights.text}.", highlight=False, markup=False, soft_wrap=True)
    if checked.job.clouds:
        on_clouds = _plan_on_clouds(sessions, checked, out)
        plan, printed = on_clouds.as_plan(), cloud_plan_json(on_clouds)
        printed["bound_micro_usd"] = bound_of_plan(plan, on_clouds.deadline_ms)
        if not dry_run:
            _check_clouds(checked, plan, out, allow_old_prices, weights_file)
    else:
        plan = plan_local(checked.job, _own_prices(checked.job, read_catalog()))
        check_budget(plan)
        printed = plan_dict(plan)
        for line in plan_lines(checked.job, plan):
            out.print(line, highlight=False, markup=False, soft_wrap=True)
        found = preflight(checked, home(), start=weights_file)
        out.print("Checked: reward, prompts and disk.", highlight=False)
        if checked.job.clock_factor == "auto":
            checked = checked.with_clock_factor(auto_clock_factor(found["slowness"]))
            out.print(clock_text(checked.job.factor), highlight=False)
    if dry_run:
        _print_json(as_json, {"name": checked.job.name, "started": False, "plan": printed})
        out.print("Dry run: nothing was started.", highlight=False)
        return ExitCode.OK
    if not yes:
        _confirm(out)
    if checked.job.clouds:
        from launcher.provision.provide import cloud_apis, prepare_folder

        name = checked.job.name
        say = partial(out.print, highlight=False, markup=False, soft_wrap=True)
        prepare_folder(runs_folder() / name, checked.job, cloud_apis(checked.job.clouds), checked.workdir, say)
    follow = Follow(name=checked.job.name, out=out, on_exit=on_exit, release_seconds=release_seconds(checked.job.infra))
    start: Callable[[sessionmaker[Session], str], object] = start_service if service else start_controller
    if weights is not None:
        start = partial(_send_and_start, weights, checked.job, start)
    answer = _start_and_follow(sessions, checked, plan, follow, detach, {"result": result, "html": html}, start)
    _print_json(as_json, answer)
    return int(answer["exit_code"])


def overrides(flags: Mapping[str, Any], settings: tuple[str, ...]) -> dict[str, Any]:
    """Return the flags by dotted field of the job. `--set` comes first, so a flag with its own name wins."""
    fields: dict[str, Any] = {}
    for setting in settings:
        name, equals, value = setting.partition("=")
        if not equals:
            raise click.UsageError(f"--set {setting} has no value; write --set FIELD=VALUE")
        fields[name.strip()] = value
    dotted = {
        "max_total": "budget.max_total",
        "max_hourly": "budget.max_hourly",
        "deadline": "budget.deadline",
        "exploration": "exploration.mode",
    }
    return fields | {dotted.get(flag, flag): value for flag, value in flags.items() if value is not None}


def _plan_on_clouds(sessions: sessionmaker[Session], checked: CheckedJob, out: Console) -> CloudPlan:
    """Plan the nodes to buy, print the plan, and return the plan."""
    now_ms = time.time_ns() // 1_000_000
    plan = cloud_plan(sessions, checked.job, home() / "catalogs", now_ms)
    for line in cloud_plan_lines(checked.job, plan, now_ms):
        out.print(line, highlight=False, markup=False, soft_wrap=True)
    return plan


def _check_clouds(
    checked: CheckedJob, plan: Plan, out: Console, allow_old_prices: bool, weights: Path | None = None
) -> None:
    """Check the job, prices, this machine and the clouds before buying. Raises Failure on a failed check."""
    from launcher.provision.provide import cloud_apis, ssh_from  # imports cloud libraries, unused by a local launch

    check_job(checked, plan.slots)
    if not allow_old_prices:
        check_prices(plan.slots, time.time_ns() // 1_000_000)
    check_here(checked, os.environ)
    if checked.job.model.path is not None:
        out.print("A model of this size is not loaded here, so reward and prompts were not tried.", highlight=False)
    elif find_spec("torch") is not None:
        ask_engine(checked, weights)
    else:
        out.print("The engine is not installed here, so reward and prompts were not tried.", highlight=False)
    places = {site.place for site in plan.sites}
    apis = cloud_apis(checked.job.clouds)
    check_named(checked.job, apis, places, lambda: ssh_from(checked.job))
    for cloud, caller in check_clouds(checked, apis, places).items():
        out.print(f"Checked: {cloud} as {caller.identity} ({caller.account}), and its bucket.", highlight=False)


def _own_prices(job: Job, offers: Sequence[Offer]) -> Sequence[Offer]:
    """Return the offers with the job's price overrides and discounts applied."""
    return as_you_pay(offers, job.price_overrides, job.discounts, time.time_ns() // 1_000_000)


def check_budget(plan: Plan) -> None:
    """Refuse a plan above max_hourly, before the budget guard refuses the first purchase. Raises BudgetError."""
    limit, expected = plan.max_hourly_micro_usd, plan.expected_micro_usd_per_hour
    if limit is not None and expected > limit:
        raise BudgetError(
            f"the plan costs {hourly(expected)}, more than budget.max_hourly {hourly(limit)}; raise it "
            "(--max-hourly), or ask for fewer nodes (resources.rollout.num_nodes)"
        )


def exit_code(view: RunView) -> ExitCode:
    """Return the exit code for the final status and reason of a run."""
    match view.status, view.reason.partition(":")[0].strip():
        case "finished", _:
            return ExitCode.OK
        case "stopped", "budget":
            return ExitCode.STOPPED_BY_BUDGET
        case "stopped", "deadline":
            return ExitCode.DEADLINE_MISSED
        case _:
            return ExitCode.FAILURE


# --- following ---------------------------------------------------------------------------------------


class Hangup(Exception):
    """The terminal was closed (SIGHUP)."""


class Terminated(Exception):
    """This command received SIGTERM."""


@dataclass(kw_only=True)
class Follow:
    """State of following a run: the output, the answer to an interruption, and the rewards so far."""

    name: str
    out: Console
    on_exit: str
    release_seconds: float
    rewards: list[float] = field(default_factory=list)

    def until_it_ends(self, sessions: sessionmaker[Session], header: str) -> RunView:
        if self.out.is_terminal:
            with Live(console=self.out, auto_refresh=False) as live:
                for view in self._views(sessions):
                    live.update(panel(view, self.rewards, header), refresh=True)
            return view
        last: tuple[str, int, str] | None = None
        said = 0.0
        for view in self._views(sessions):
            news = (view.status, view.iteration, view.last_event)
            if news != last or time.monotonic() - said > QUIET_SECONDS:
                self.say(plain_line(view))
                last, said = news, time.monotonic()
        return view

    def _views(self, sessions: sessionmaker[Session]) -> Iterator[RunView]:
        """Yield views of the run until the run has ended; the last view shows the end. Restart a dead controller."""
        iteration, alone_since = -1, None
        while True:
            view = run_view(sessions, self.name)
            if view.reward is not None and view.iteration != iteration:
                self.rewards.append(view.reward)
                iteration = view.iteration
            yield view
            if view.status in ENDED:
                return
            alone_since = None if view.controlled else alone_since or time.monotonic()
            if alone_since is not None and time.monotonic() - alone_since > ALONE_SECONDS:
                self.say(f"{self.name} has lost its controller; starting another")
                start_controller(sessions, self.name)
                alone_since = None
            time.sleep(LOOK_SECONDS)

    def say(self, text: str) -> None:
        """Print a line. After the first failed write to a lost terminal, discard all output."""
        try:
            self.out.print(text, highlight=False, markup=False, soft_wrap=True)
        except OSError:
            self.out = Console(file=open(os.devnull, "w"))  # noqa: SIM115


def _send_and_start(
    weights: StartWeights,
    job: Job,
    start: Callable[[sessionmaker[Session], str], object],
    sessions: sessionmaker[Session],
    name: str,
) -> object:
    """Put the start weights into the run's stores, then start the controller. Return the result of `start`."""
    send_start(weights, job, runs_folder() / name)
    weights.file.unlink()  # following takes hours, and weights may be large
    return start(sessions, name)


def _start_and_follow(
    sessions: sessionmaker[Session],
    checked: CheckedJob,
    plan: Plan,
    follow: Follow,
    detach: bool,
    files: Mapping[str, Path | None],
    start: Callable[[sessionmaker[Session], str], object],
) -> dict[str, Any]:
    """Create the run, start its controller and follow the run. Return the object printed by `--json`."""
    name = create_run(sessions, checked, plan, follow.name)
    code = ExitCode.FAILURE
    try:
        with _signals():
            started = start(sessions, name)
            if isinstance(started, Path):
                follow.say(f"{started} restarts its controller; past your logout only with `loginctl enable-linger`.")
            if detach:
                follow.say(f"{name} has started. See it: spotrl status {name}, spotrl events {name} --follow")
                code = ExitCode.OK
            else:
                code = exit_code(follow.until_it_ends(sessions, header(checked.job, plan)))
    except KeyboardInterrupt:
        code = _interrupted(sessions, follow)
    except Terminated:
        code = _interrupted(sessions, follow, may_ask=False)
    except Hangup:
        code = ExitCode.OK  # the run continues; only following ended
    except BaseException:
        if follow.on_exit == "down":
            _stop(sessions, follow, "launch failed")
        raise
    finally:
        view = run_view(sessions, name)
        if view.status in ENDED:
            _settle(sessions, follow, checked.job)
        left = still_running(sessions, name)
        for line in last_words(view, left):
            follow.say(line)
        _write_files(sessions, name, **files)
    if view.status in ENDED and left:
        code = ExitCode.TEARDOWN_INCOMPLETE
    return {"started": True, "exit_code": int(code), "still_running": left, "plan": plan_dict(plan), **asdict(view)}


def _settle(sessions: sessionmaker[Session], follow: Follow, job: Job) -> None:
    """Wait for the cleanup after the run's end: the last local process, or the resources made for cloud nodes.

    The cleanup takes minutes at worst. Ctrl-C ends the waiting; the cleanup continues.
    """
    if not job.clouds:
        wait_released(sessions, follow.name, SETTLE_SECONDS)
    elif left := still_running(sessions, follow.name):
        follow.say(f"{follow.name} is over; waiting until these are gone: {', '.join(left)}")
        with suppress(KeyboardInterrupt):
            bring_down(sessions, follow.name, release_seconds(job.infra))


def _interrupted(sessions: sessionmaker[Session], follow: Follow, may_ask: bool = True) -> ExitCode:
    """Keep or stop the run after an interruption. If nobody can be asked, stop the run: stopping costs least."""
    choice = follow.on_exit
    if choice == "ask":
        choice = "down"
        if may_ask and can_ask():
            try:
                answer = click.prompt(
                    f"\n{follow.name} is running. Keep it running, or stop it?",
                    type=click.Choice(["keep", "stop"]),
                    default="stop",
                    err=True,
                )
                choice = "keep" if answer == "keep" else "down"
            except (click.Abort, KeyboardInterrupt):
                choice = "down"
    if choice == "keep":
        return ExitCode.OK
    reason = "stopped by Ctrl-C" if may_ask else "launch was terminated"
    return ExitCode.INTERRUPTED if _stop(sessions, follow, reason) else ExitCode.TEARDOWN_INCOMPLETE


def _stop(sessions: sessionmaker[Session], follow: Follow, reason: str) -> bool:
    """Stop the run. Return True if every node was released in time."""
    request_stop(sessions, follow.name, reason)
    follow.say(f"Stopping {follow.name} (Ctrl-C again: do not wait) ...")
    try:
        return not bring_down(sessions, follow.name, follow.release_seconds)
    except KeyboardInterrupt:
        return False


def last_words(view: RunView, left: Sequence[str]) -> Iterator[str]:
    """Yield the last lines of every `launch`: the run's status, the running nodes, and the command to stop the run."""
    if view.status in ENDED:
        why = f" ({view.reason})" if view.reason else ""
        yield f"{view.name} {view.status}{why}: {score_text(view)}; {dollars(view.spent_micro_usd)} spent."
    if left:
        yield f"Still running: {', '.join(left)}; {money_text(view)}."
        yield f"Stop it: spotrl down {view.name}"
    else:
        yield f"Nothing of it runs any more. See it: spotrl report {view.name}"


@contextmanager
def _signals() -> Iterator[None]:
    """Turn SIGHUP and SIGTERM into exceptions while following the run."""

    def hang_up(number: int, frame: Any) -> None:
        silence = os.open(os.devnull, os.O_WRONLY)
        for stream in (1, 2):  # a write to the lost terminal would raise an error
            os.dup2(silence, stream)
        raise Hangup

    def terminate(number: int, frame: Any) -> None:
        raise Terminated

    before = {
        signal.SIGHUP: signal.signal(signal.SIGHUP, hang_up),
        signal.SIGTERM: signal.signal(signal.SIGTERM, terminate),
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


# --- before and after --------------------------------------------------------------------------------


def _check_name_is_free(sessions: sessionmaker[Session], checked: CheckedJob) -> None:
    """Refuse a used name before any other work; `create_run` also refuses a used name. Raises JobError."""
    with sessions() as session:
        used = set(session.scalars(select(Run.name)))
    name = checked.job.name
    if name in used:
        free = next(f"{name}-{n}" for n in range(2, len(used) + 3) if f"{name}-{n}" not in used)
        raise JobError(
            f"a run called {name} exists already",
            f"give this one a name (--name {free}), or look at that one: spotrl report {name}",
            field="name",
        )
    store = runs_folder() / name / "store"
    if checked.job.infra == LOCAL and (store / "checkpoints").exists():
        raise JobError(
            f"{store} holds checkpoints of an earlier run called {name}, which this ledger does not know, and a new "
            "run would go on from them",
            f"give this one another name (--name {name}-2), or move {store.parent} away",
            field="name",
        )


def can_ask() -> bool:
    """Return True if a user at a terminal can answer questions."""
    return sys.stdin.isatty()


def _confirm(out: Console) -> None:
    if not can_ask():
        raise click.UsageError("nobody can be asked here; look at the plan, then add -y")
    click.confirm("Start it?", default=True, abort=True, err=out.stderr)


def _write_files(sessions: sessionmaker[Session], name: str, *, result: Path | None, html: Path | None) -> None:
    """Write result.json and the HTML report, also for a failed run: users need both files most after a failure."""
    if not (result or html):
        return
    from launcher.cli.report import pictures_of
    from launcher.report.build import build_report
    from launcher.report.html import render_html
    from launcher.report.result import result_dict

    with sessions() as session:
        run = find_run(session, name)
        if result:
            _write(result, json.dumps(result_dict(session, name, running_processes(run)), indent=2) + "\n")
        if html:
            report = build_report(session, run, run_clock(run).now_ms())
            _write(html, render_html(report, pictures_of(run)))


def _write(path: Path, text: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, "utf-8")
    except OSError as error:
        raise Failure(f"{path} cannot be written ({error.strerror}); the run's facts are in the ledger") from None


def _print_json(wanted: bool, value: dict[str, Any]) -> None:
    if wanted:
        click.echo(json.dumps(value, default=str))
