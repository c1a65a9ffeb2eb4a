"""`spotrl selftest`: try a whole run with a preemption on a real cloud, for at most $5."""

import getpass
import io
import json
import os
import platform
import time
from collections.abc import Mapping
from contextlib import nullcontext, redirect_stdout, suppress
from pathlib import Path
from typing import Any, ClassVar

import click
from pydantic import TypeAdapter, ValidationError
from rich.console import Console
from sqlalchemy import select
from sqlalchemy.orm import Session, sessionmaker

from launcher.cli.launch import launch
from launcher.cli.output_file import check_output
from launcher.clouds.base import CallerIdentity
from launcher.clouds.build import build_cloud_api
from launcher.clouds.preempting import Preempter, build_preempter
from launcher.exit_codes import BudgetError, ExitCode, Failure
from launcher.harmless import harmless
from launcher.job.values import RunName
from launcher.ledger.models import Run
from launcher.ledger.prices import latest_prices
from launcher.ledger.store import find_run
from launcher.market.offers import CLOUDS, current_catalog
from launcher.money import dollars, duration, hourly, parse_money
from launcher.runs.run_buckets import buckets_of
from launcher.runs.runs import CLOUD_RELEASE_SECONDS, bring_down
from launcher.selftest.abandoned import abandoned, alive, folder_of
from launcher.selftest.acting import LaunchedRun
from launcher.selftest.conduct import MINUTES, Conductor
from launcher.selftest.interruption import Interrupted, Interruption, interruptions
from launcher.selftest.job import HOURLY_MICRO_USD, MOST_MICRO_USD, STOP_MICRO_USD, budget_of, cheapest_gpu, job_text
from launcher.selftest.outcome import SelftestOutcome, outcome_of, sendable
from launcher.selftest.steps import PURPOSE, Step
from launcher.services.on_offer import on_offer
from launcher.settings import home, runs_folder


@click.command()
@click.option("--infra", required=True, type=click.Choice(CLOUDS), help="Cloud to buy the two nodes from.")
@click.option("--store", help="Bucket and folder for checkpoints, like s3://my-bucket/spotrl (default: your config's).")
@click.option("--name", help="Name of the run (default: selftest, the cloud and the time).")
@click.option("--gpu", help="GPU of both nodes, like L4 (default: the cheapest with an on-demand and a spot offer).")
@click.option("--max-total", default="$5", show_default=True, help="Most that it may cost; at most $5.")
@click.option(
    "--set",
    "settings",
    multiple=True,
    metavar="FIELD=VALUE",
    help="Set a field of the job, like ssh_from=203.0.113.7/32. Repeatable.",
)
@click.option(
    "--minutes",
    multiple=True,
    metavar="STEP=N",
    help="Longest time of a step in minutes, like buy=60 where capacity is rare. Repeatable.",
)
@click.option("--to", type=click.Path(dir_okay=False, path_type=Path), help="File of the outcome (default: NAME.json).")
@click.option("-y", "--yes", is_flag=True, help="Skip the confirmation before the start.")
@click.option("--dry-run", is_flag=True, help="Show the steps, the plan and its price; buy nothing.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object at the end. Progress goes to stderr.")
@click.pass_obj
def selftest(
    sessions: sessionmaker[Session],
    /,
    infra: str,
    store: str | None,
    name: str | None,
    gpu: str | None,
    max_total: str,
    settings: tuple[str, ...],
    minutes: tuple[str, ...],
    to: Path | None,
    yes: bool,
    dry_run: bool,
    as_json: bool,
) -> int:
    """Try a run with a preemption on a real cloud, for up to $5.

    The command buys an on-demand and a spot node, trains a small model, has the cloud preempt the spot node, and checks
    drain, replacement, checkpoint, resume, cleanup and bill. It takes half an hour or more. Whatever happens, it ends
    everything it bought; after SIGKILL the next selftest or `spotrl down` does. The outcome goes to a file without
    account, identity, bucket or secret, which you can send.

    Exit code 0: every step passed; 1: a step failed, and is named; 6: the budget does not allow it, and nothing was
    bought; 10: something may still cost money; 130: interrupted, and nothing is left.

    \b
    Example:
      spotrl selftest --infra aws --dry-run
      spotrl selftest --infra aws --store s3://my-bucket/spotrl
      spotrl selftest --infra gcp --store gs://my-bucket/spotrl -y --json
    """
    out = Console(stderr=as_json)
    run = _run_name(name or f"selftest-{infra}-{time.strftime('%m%d%H%M', time.gmtime())}")
    limit, longest = _limit(max_total), _minutes(minutes)
    bought = _gpu(sessions, infra, gpu)
    job = _write_job(run, job_text(run, infra, str(bought["gpu"]), limit))
    _print_steps(out, bought, limit)
    words = [str(job), "--max-total", f"{budget_of(limit) / 1e6:.2f}", "--max-hourly", f"{HOURLY_MICRO_USD / 1e6:.2f}"]
    words.append("--detach")
    for setting in (*([f"store.{infra}={store}"] if store else []), *settings):
        words += ["--set", setting]
    if dry_run:
        _launch(sessions, [*words, "--dry-run"], as_json)
        steps = [{"step": step.value, "purpose": PURPOSE[step]} for step in Step]
        if as_json:
            click.echo(
                json.dumps(
                    {
                        "run": run,
                        "cloud": infra,
                        "started": False,
                        "max_total_micro_usd": limit,
                        **bought,
                        "steps": steps,
                    }
                )
            )
        return ExitCode.OK
    file = to or Path(f"{run}.json")
    check_output(file)
    _end_abandoned(sessions, out)
    preempter, caller = build_preempter(infra), build_cloud_api(infra).caller()
    _check(preempter)
    with alive(run), interruptions() as interruption:
        conductor = _conductor(sessions, run, preempter, out, interruption, longest)
        _try(sessions, run, conductor, [*words, *(["-y"] if yes else [])], as_json)
        facts = conductor.facts()
        outcome = outcome_of(run, facts, conductor.results, int(conductor.exit_code(facts)))
        answer = sendable(outcome, _private(sessions, run, caller))
        _write(file, json.dumps(answer, indent=2) + "\n")
        _print_end(out, outcome, file)
        if as_json:
            click.echo(json.dumps(answer))
    return outcome.exit_code


def _try(sessions: sessionmaker[Session], run: str, conductor: Conductor, words: list[str], as_json: bool) -> None:
    """Launch and conduct. Raises what the launch raises if it bought nothing: there is no run then."""
    try:
        with conductor.interruption.may_interrupt():
            _launch(sessions, words, as_json)
    except BaseException as error:
        if _exists(sessions, run):
            conductor.end_launch(error)
        elif isinstance(error, Interrupted):
            raise KeyboardInterrupt from error  # nothing was bought
        else:
            raise
    else:
        conductor.conduct()


def _end_abandoned(sessions: sessionmaker[Session], out: Console) -> None:
    """End the runs that earlier selftests left. Raises StillThere if one may still cost money."""
    for run in abandoned(sessions):
        out.print(f"{run} was left by its selftest; ending it first.", highlight=False, soft_wrap=True)
        if left := bring_down(sessions, run, CLOUD_RELEASE_SECONDS):
            raise StillThere(
                f"{', '.join(left)} of the earlier selftest {run} may still cost money; stop it with "
                f"`spotrl down {run}`, then look with `spotrl reap`"
            )
        out.print(f"{run} is down; nothing of it is left running.", highlight=False, soft_wrap=True)


class StillThere(Failure):
    """An earlier selftest may still cost money, so nothing is bought."""

    exit_code: ClassVar[ExitCode] = ExitCode.TEARDOWN_INCOMPLETE


def _run_name(text: str) -> str:
    """Return the name. Raises click.UsageError for a name that is none, because a folder gets it before the launch."""
    try:
        return str(TypeAdapter(RunName).validate_python(text))
    except ValidationError as error:
        raise click.UsageError(f"--{error.errors()[0]['ctx']['error']}") from None


def _minutes(texts: tuple[str, ...]) -> dict[Step, float]:
    """Return the longest time of each step in minutes. Raises click.UsageError for another step or no number."""
    longest = dict(MINUTES)
    for text in texts:
        name, _, number = text.partition("=")
        try:
            step, value = Step(name.strip()), float(number)
        except ValueError:
            step, value = Step.BUY, 0.0
        if not 0 < value < float("inf"):
            steps = ", ".join(one.value for one in Step)
            raise click.UsageError(f"--minutes is {text!r}; write STEP=MINUTES above 0, where STEP is one of {steps}")
        longest[step] = value
    return longest


def _limit(text: str) -> int:
    """Return the budget in micro-dollars. Raises BudgetError above the largest cost of a selftest."""
    try:
        limit = parse_money(text)
    except ValueError as error:
        raise click.UsageError(f"--max-total is {text!r}; {error}") from None
    if limit > MOST_MICRO_USD:
        most = dollars(MOST_MICRO_USD)
        raise BudgetError(f"a selftest costs at most {most}, and --max-total is {dollars(limit)}; use {most} or less")
    if limit < 2 * STOP_MICRO_USD:
        raise BudgetError(
            f"--max-total is {dollars(limit)}, of which a stop may take {dollars(STOP_MICRO_USD)}; use $1 or more"
        )
    return limit


def _gpu(sessions: sessionmaker[Session], cloud: str, gpu: str | None) -> dict[str, str | int]:
    """Return the GPU to buy with its lowest prices, from the prices that a plan uses."""
    with sessions() as session:
        latest = latest_prices(session, clouds=(cloud,))
    offers = on_offer(current_catalog(home() / "catalogs").all_offers(), latest, time.time_ns() // 1_000_000)
    wanted = [offer for offer in offers if gpu in (None, offer.accelerator)]
    found, on_demand, spot = cheapest_gpu(wanted, cloud)
    return {"gpu": found, "on_demand_micro_usd_per_hour": on_demand, "spot_micro_usd_per_hour": spot}


def _write_job(run: str, text: str) -> Path:
    """Write the job into a folder of its own, because nodes are sent the folder of the job file."""
    folder = folder_of(run)
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    file = folder / "job.yaml"
    file.write_text(text, "utf-8")
    return file


def _launch(sessions: sessionmaker[Session], words: list[str], as_json: bool) -> None:
    """Run `spotrl launch`. With `as_json` its own JSON is not printed. Raises what the command raises.

    While it starts the controller, the command itself answers a SIGTERM: it stops the run, and says so in its code.
    """
    more = ["--json"] if as_json else []
    with redirect_stdout(io.StringIO()) if as_json else nullcontext():
        try:
            code = launch.main(args=[*words, *more], prog_name="spotrl", standalone_mode=False, obj=sessions)
        except BudgetError as error:
            hint = f"A selftest keeps its limits of {dollars(MOST_MICRO_USD)} and {hourly(HOURLY_MICRO_USD)}"
            raise BudgetError(f"{error}. {hint}: choose a cheaper GPU (--gpu)") from None
    if code == ExitCode.INTERRUPTED:
        raise Interrupted("SIGTERM")
    if code:
        raise Failure(f"`spotrl launch` ended with code {code}")


def _check(preempter: Preempter) -> None:
    """Raise Failure if a node could not be preempted, before anything is bought."""
    from launcher.checks.check import Verdict
    from launcher.checks.selftest_needs import selftest_lines

    for line in selftest_lines(preempter):
        if line.verdict is Verdict.FAIL:
            raise Failure(f"{line.what}: {line.found}; {line.remedy}")


def _conductor(
    sessions: sessionmaker[Session],
    run: str,
    preempter: Preempter,
    out: Console,
    interruption: Interruption,
    minutes: Mapping[Step, float],
) -> Conductor:
    began = time.monotonic()

    def say(step: Step, text: str) -> None:
        passed = duration(round((time.monotonic() - began) * 1000))
        line = f"[{passed:>8}] {step.value:<10} {harmless(text)}"
        with suppress(OSError):  # a lost terminal must not stop the cleanup
            out.print(line, highlight=False, markup=False, soft_wrap=True)

    api = build_cloud_api(preempter.cloud)
    launched = LaunchedRun(name=run, sessions=sessions, api=api, preempter=preempter)
    return Conductor(run=launched, say=say, interruption=interruption, minutes=minutes)


def _exists(sessions: sessionmaker[Session], run: str) -> bool:
    with sessions() as session:
        return session.scalar(select(Run.id).where(Run.name == run)) is not None


def _private(sessions: sessionmaker[Session], run: str, caller: CallerIdentity) -> list[str]:
    """Return texts that must not be in the file."""
    with sessions() as session:
        found = find_run(session, run)
        buckets = [url.partition("://")[2].partition("/")[0] for url in buckets_of(found)]
    users = [os.environ.get("GOOGLE_CLOUD_PROJECT", ""), platform.node(), str(Path.home()), str(home())]
    with suppress(OSError, KeyError):
        users.append(getpass.getuser() if getpass.getuser() != "root" else "")
    return [caller.account, caller.identity, caller.owner, str(runs_folder()), *buckets, *users]


def _write(file: Path, text: str) -> None:
    try:
        file.write_text(text, "utf-8")
    except OSError as error:
        click.echo(f"{file} cannot be written ({error.strerror}); `--json` prints the outcome", err=True)


def _print_steps(out: Console, bought: dict[str, Any], limit: int) -> None:
    on_demand, spot = bought["on_demand_micro_usd_per_hour"], bought["spot_micro_usd_per_hour"]
    out.print(
        f"selftest: one on-demand node from {hourly(on_demand)} and one spot node from {hourly(spot)}, each with one "
        f"{bought['gpu']}; at most {dollars(limit)}, of which {dollars(STOP_MICRO_USD)} are for the stop. Its steps:",
        highlight=False,
        soft_wrap=True,
    )
    for step in Step:
        out.print(f"  {step.value:<10} {PURPOSE[step]}", highlight=False)


def _print_end(out: Console, outcome: SelftestOutcome, file: Path) -> None:
    lines = [f"{one.step}: {one.verdict}" for one in outcome.steps if one.verdict in ("not tested", "interrupted")]
    if outcome.failed_steps:
        lines.append(f"Failed: {', '.join(outcome.failed_steps)}.")
    elif outcome.passed:
        lines.append(f"Every step passed; {dollars(outcome.spent_micro_usd)} spent by the estimate.")
    if outcome.still_running or outcome.exit_code == ExitCode.TEARDOWN_INCOMPLETE:
        lines.append(f"May still cost money: {', '.join(outcome.still_running) or 'the cloud was not asked'}.")
        lines.append(f"Stop it: spotrl down {outcome.run}; then look with spotrl reap")
    else:
        lines.append("Nothing of it runs any more.")
    lines.append(f"The outcome is in {file}; it has no account, identity, bucket or secret.")
    for text in lines:
        with suppress(OSError):
            out.print(harmless(text), highlight=False, markup=False, soft_wrap=True)
