"""`spotrl launch`: check the job, show the plan, start the controller, follow it.

The controller is a separate process and manages the run; this command only follows the run. Following may end by
Ctrl-C, a lost terminal or an error. In each case the command prints which nodes still run and how to stop the run.
"""

import json
import os
import shlex
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from types import MappingProxyType
from typing import Any, Literal

import click
from rich.console import Console
from sqlalchemy import select
from sqlalchemy.orm import Session, sessionmaker

from engine.lora_file import read_lora
from launcher.checks.preflight import ask_engine, ask_prompt_warnings, check_lora, preflight
from launcher.checks.ready import check_clouds, check_here, check_job, check_named, check_prices, closed_regions
from launcher.cli.cloud_plan_text import cloud_plan_lines
from launcher.cli.confirm import confirm
from launcher.cli.follow import Follow, can_ask, start_and_follow
from launcher.cli.layout import fitted
from launcher.cli.output_file import check_output
from launcher.cli.plan_screen import cloud_screen, local_screen, plan_warnings, warning_lines
from launcher.cli.plan_text import plan_dict, plan_lines
from launcher.cli.price_option import prices_option
from launcher.cli.progress_words import working
from launcher.cli.typed import typed
from launcher.decide.run_budget import bound_of_plan
from launcher.exit_codes import BudgetError, ExitCode, Failure
from launcher.job.checked import CheckedJob, JobError
from launcher.job.hub import download_model
from launcher.job.load import load_job
from launcher.job.resolved import Resolved, resolve_checked
from launcher.job.schema import Job
from launcher.ledger.models import LOCAL, Run
from launcher.market.offers import Offer, Prices, current_catalog, read_catalog
from launcher.money import hourly
from launcher.placement.cloud_plan import Span, cloud_plan_json
from launcher.placement.fleets import chooses_fleet, with_kept_fleet
from launcher.placement.plan import Plan, plan_local
from launcher.replay.of_plan import check_deadline
from launcher.runs.kept_plan import (
    ChangedField,
    KeptPlan,
    at_todays_prices,
    job_changes,
    kept_plan_text,
    moved_prices,
    now_text,
    read_kept_plan,
    refuse_changes,
)
from launcher.runs.runs import release_seconds, start_controller
from launcher.runs.service import check_service, start_service
from launcher.runs.start import StartWeights, find_start, send_start
from launcher.services.fleets import Fleets, Goal, fleet_lines, front_of, plan_of_fleet, with_fleet_chosen
from launcher.services.own_prices import as_you_pay
from launcher.services.planning import (
    cloud_offers,
    cloud_plan,
    current_market,
    plan_with_other_trainer,
    plans_that_buy_when_late,
    with_replays,
)
from launcher.settings import config_path, home, runs_folder
from launcher.whole_file import whole_file

TRYING = "Trying prompts, model and reward on this machine"


class Warned(Failure):
    """`--strict`, and the plan or the job has warnings; nothing was started."""

    exit_code = ExitCode.WARNINGS


@click.command()
@click.argument("job", type=click.Path(path_type=Path), required=False)
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
@click.option(
    "--deadline",
    help="Time in which the run should be done, on the run's clock, like 12h30m. Without --max-runtime the run also "
    "ends then.",
)
@click.option("--max-runtime", help="Maximum duration of the run, done or not, like 24h.")
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
    help="Set a field of the job, like checkpoint.every=2. Repeatable. A path is relative to the working folder.",
)
@click.option(
    "--minimize",
    type=click.Choice(["cost", "time"]),
    default="cost",
    show_default=True,
    help="On clouds, for a job that leaves its GPUs open. cost: buy the cheapest plan that is in time. time: buy the "
    "quickest within the budget.",
)
@click.option("--choose", type=int, metavar="N", help="Buy the plan with this number of those that are shown.")
@click.option(
    "--allow-old-prices",
    is_flag=True,
    help="On clouds: buy even if a price is older than 24 hours (spot) or 30 days (on-demand), or has no known date.",
)
@prices_option
@click.option("-y", "--yes", is_flag=True, help="Skip the confirmation before the start.")
@click.option("--dry-run", is_flag=True, help="Check the job and show the plan; start nothing.")
@click.option(
    "--explain",
    is_flag=True,
    help="Below the plan, print all it rests on: prices with sources, memory, factors, every alternative.",
)
@click.option(
    "--out",
    "out_file",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="With --dry-run: write the plan to FILE, for --plan.",
)
@click.option(
    "--plan",
    "plan_file",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="In place of JOB and its flags: buy the plan of FILE as it was shown, or name what changed (exit code 12). "
    "Prices may move up to the plan's own highest price an hour, most dollars, and upper end of the expected dollars.",
)
@click.option(
    "--strict",
    is_flag=True,
    help="Start nothing, and end with exit code 11, if the plan or the job has warnings. Quotas and credentials, "
    "which a dry run does not ask for, are none: `spotrl check`.",
)
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
    "nodes. ask: ask whether to detach (d, or Ctrl-C again), continue (c) or stop (s); without a terminal or after "
    "SIGTERM, stop the run.",
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
    /,
    job: Path | None,
    settings: tuple[str, ...],
    minimize: Literal["cost", "time"],
    choose: int | None,
    allow_old_prices: bool,
    prices: Prices,
    yes: bool,
    dry_run: bool,
    explain: bool,
    out_file: Path | None,
    plan_file: Path | None,
    strict: bool,
    detach: bool,
    service: bool,
    on_exit: str,
    as_json: bool,
    result: Path | None,
    html: Path | None,
    **flags: Any,
) -> int:
    """Check JOB, show its plan, start the run and follow it.

    A separate controller process manages the run, so a run survives a closed terminal. Ctrl-C asks whether to detach,
    continue or stop; --on-exit gives the answer in advance. `spotrl attach` follows a run again.

    \b
    Example:
      spotrl launch quickstart.yaml --dry-run
      spotrl launch quickstart.yaml --dry-run --explain
      spotrl launch quickstart.yaml --max-total 40 --name first-try
      spotrl launch quickstart.yaml --max-total 40 --dry-run --strict --out plan.json
      spotrl launch --plan plan.json
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
    if prices is Prices.RECORDED and not dry_run:
        raise click.UsageError("--prices recorded is to compare with, and not to buy by; add --dry-run")
    if out_file is not None and (not dry_run or plan_file is not None):
        raise click.UsageError("--out writes the plan of a dry run; add --dry-run, and leave out --plan")
    if prices is Prices.RECORDED and not dry_run:
        raise click.UsageError("--prices recorded shows what a plan would have cost; add --dry-run, or leave it out")
    out = Console(stderr=as_json)
    fields = overrides(flags, settings) | ({"recovery.controller_stays_up": True} if service else {})
    kept = None if plan_file is None else _Kept(file=plan_file, plan=read_kept_plan(plan_file))
    if kept is not None:
        if job is not None or fields.keys() - {"recovery.controller_stays_up"}:
            raise click.UsageError("--plan names the job and its flags; leave out JOB and its flags, or plan anew")
        job, fields = Path(kept.plan.job), kept.plan.flags | fields
    if job is None:
        raise click.UsageError("give a JOB, or the file of a plan (--plan FILE)")

    with working(out, f"Reading {job.name} and its prompts") as say:

        def fetch(model: str) -> Path:
            say("")
            out.print(f"Downloading {model} from the hub, unless it is here ...", highlight=False, markup=False)
            return download_model(model)

        checked = load_job(
            job,
            fields,
            environ=os.environ,
            user_config=config_path(),
            fetch=None if dry_run else fetch,
            working_folder=None if kept is None else Path(kept.plan.folder),
        )
    if not checked.lines:
        raise JobError("it is empty", "`spotrl init` writes one with comments", file=job)
    if kept is not None:
        checked = checked.with_job(with_kept_fleet(checked.job, kept.plan.values))
        refuse_changes(kept.file, kept.plan, job_changes(kept.plan, checked))
    _check_name_is_free(sessions, checked)
    opened, fleets = checked, None
    if chooses_fleet(checked.job):
        checked, fleets = _chosen_fleet(sessions, opened, out, prices, minimize, choose)
    elif choose is not None or minimize != "cost":
        raise click.UsageError(
            "--minimize and --choose are for a job on clouds that leaves its GPUs open; leave out resources, or name "
            "several kinds in resources.trainer.accelerators"
        )
    resolved = resolve_checked(checked)
    if service:
        check_service(checked.job, os.environ)
    weights = _find_weights(sessions, checked, out)
    weights_file = None if weights is None else weights.file
    warnings: list[str] = []
    if checked.job.clouds:
        check_lora(checked)
        planned, of_plan = _plan_on_clouds(
            sessions, checked, resolved, out, explain, allow_old_prices, kept, prices, fleets
        )
        with working(out, "Looking for prompts that the model would cut"):
            of_prompts = ask_prompt_warnings(checked)
        _print_warnings(out, of_prompts)
        if not dry_run:
            if closed := _closed_regions(checked, planned.plan, out):
                if fleets is not None:
                    checked, fleets = _chosen_fleet(sessions, opened, out, prices, minimize, choose, closed)
                    resolved = resolve_checked(checked)
                planned, of_plan = _plan_on_clouds(
                    sessions, checked, resolved, out, explain, allow_old_prices, kept, prices, fleets, closed
                )
            warnings += _check_clouds(checked, planned.plan, out, allow_old_prices, weights_file)
        warnings = [*of_plan, *of_prompts, *warnings]
    else:
        planned = _plan_here(resolved, out, explain, kept)
        warnings += _check_on_this_machine(checked, out, weights_file)
    if strict and warnings and not dry_run:
        raise Warned(f"{len(warnings)} warnings, and --strict; nothing was started:\n  " + "\n  ".join(warnings))
    if dry_run:
        if out_file is not None and not (strict and warnings):
            _write_plan(out_file, checked, fields, planned)
            out.print(f"To buy this plan: spotrl launch --plan {out_file}", highlight=False, markup=False)
        _print_json(
            as_json, {"name": checked.job.name, "started": False, "plan": planned.printed, "warnings": warnings}
        )
        out.print("Dry run: nothing was started.", highlight=False)
        return ExitCode.WARNINGS if strict and warnings else ExitCode.OK
    plan = planned.plan
    for file in filter(None, (result, html)):
        check_output(file)
    if not yes:
        _confirm(out)
    if checked.job.clouds:
        _prepare_folder(checked, out)
    follow = Follow(name=checked.job.name, out=out, on_exit=on_exit, release_seconds=release_seconds(checked.job.infra))
    start: Callable[[sessionmaker[Session], str], object] = start_service if service else start_controller
    if weights is not None:
        start = partial(_send_and_start, weights, checked.job, start)
    answer = start_and_follow(sessions, checked, plan, follow, detach, {"result": result, "html": html}, start, typed())
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
        "max_runtime": "budget.max_runtime",
        "exploration": "exploration.mode",
    }
    return fields | {dotted.get(flag, flag): value for flag, value in flags.items() if value is not None}


def _find_weights(sessions: sessionmaker[Session], checked: CheckedJob, out: Console) -> StartWeights | None:
    """Fetch the weights to start from, if the job names any. The file exists as long as the command runs."""
    if checked.job.model.lora is not None:
        lora = read_lora(checked.workdir / checked.job.model.lora)
        use = "Merges" if checked.job.model.lora_use == "merge" else "Continues"
        out.print(f"{use} the LoRA {lora.text}.", highlight=False, markup=False, soft_wrap=True)
    if checked.job.model.start is None:
        return None
    place = click.get_current_context().with_resource(TemporaryDirectory(prefix=".start-", dir=home()))
    weights = find_start(sessions, checked, Path(place))
    out.print(f"Starts from {weights.text}.", highlight=False, markup=False, soft_wrap=True)
    return weights


@dataclass(frozen=True, kw_only=True, slots=True)
class _Kept:
    """The plan of `--plan`, and its file."""

    file: Path
    plan: KeptPlan


@dataclass(frozen=True, kw_only=True, slots=True)
class _Planned:
    """A plan, its form for --json, and what a plan's file keeps of what was shown (launcher/runs/kept_plan.py)."""

    plan: Plan
    printed: dict[str, object]
    screen: tuple[str, ...]
    longest_ms: int | None = None
    cost: Span | None = None


def _plan_on_clouds(
    sessions: sessionmaker[Session],
    checked: CheckedJob,
    resolved: Resolved,
    out: Console,
    explain: bool,
    allow_old_prices: bool,
    kept: _Kept | None,
    prices: Prices,
    fleets: Fleets | None,
    closed: Mapping[tuple[str, str], str] | None = None,
) -> tuple[_Planned, list[str]]:
    """Plan the nodes to buy, or take the kept plan, and print the plan. Return it with its warnings.

    `explain`: print all that the plan rests on too. `prices`: which shipped prices count. `fleets`: those that the
    job's own was chosen from. `closed`: (cloud, region) that the plan leaves out, with reasons.
    """
    job, now_ms = checked.job, time.time_ns() // 1_000_000
    more: Iterable[str] = ()
    catalog = current_catalog(home() / "catalogs", prices)
    if kept is not None:
        planned = _kept_plan(kept, cloud_offers(sessions, job, catalog, now_ms, closed)[0], closed or {})
        warnings = list(plan_warnings(checked, planned.plan.slots, now_ms, allow_old_prices))
    else:
        whole = (sessions, resolved, catalog, now_ms, closed)
        with working(out, "Planning: prices of all regions, then replays on generated markets"):
            market = current_market(sessions, job, catalog, now_ms, closed)
            other = plan_with_other_trainer(*whole)
            if fleets is None:
                by_spot = cloud_plan(*whole)
                tighter = [late for late in plans_that_buy_when_late(market, resolved) if late.slots != by_spot.slots]
                on_clouds = with_replays(by_spot, job, other, tighter)
            else:
                on_clouds = plan_of_fleet(fleets, market, job, other)
        warnings = list(plan_warnings(checked, on_clouds.slots, now_ms, allow_old_prices))
        front = None if fleets is None else front_of(fleets, job, now_ms)
        plan, printed = replace(on_clouds.as_plan(), fleets=front), cloud_plan_json(on_clouds)
        printed["fleets"] = None if front is None else asdict(front)
        printed["bound_micro_usd"] = bound_of_plan(plan, on_clouds.longest_ms)
        planned = _Planned(
            plan=plan,
            printed=printed,
            screen=tuple(cloud_screen(job, on_clouds, len(warnings), now_ms, fleets)),
            longest_ms=on_clouds.longest_ms,
            cost=on_clouds.quoted_cost,
        )
        more = cloud_plan_lines(job, on_clouds, now_ms) if explain else ()
        if explain and fleets is not None:
            more = (*more, *fitted(fleet_lines(fleets)))
    _print_plan(out, planned.screen, more)
    _print_plan(out, warning_lines(checked, warnings))
    if kept is None:
        check_deadline(on_clouds, job.budget.deadline_confidence)
    return planned, warnings


def _chosen_fleet(
    sessions: sessionmaker[Session],
    opened: CheckedJob,
    out: Console,
    prices: Prices,
    goal: Goal,
    choose: int | None,
    closed: Mapping[tuple[str, str], str] | None = None,
) -> tuple[CheckedJob, Fleets | None]:
    """Choose the fleet of a job that leaves its GPUs open. `closed`: as of `_plan_on_clouds`."""
    with working(out, "Comparing fleets: forecasts of all, then replays of the best"):
        catalog, now_ms = current_catalog(home() / "catalogs", prices), time.time_ns() // 1_000_000
        return with_fleet_chosen(sessions, opened, catalog, now_ms, closed, goal, choose)


def _plan_here(resolved: Resolved, out: Console, explain: bool, kept: _Kept | None) -> _Planned:
    """Plan the nodes on this machine, or take the kept plan, and print the plan."""
    job = resolved.job
    offers = as_you_pay(read_catalog(), job.price_overrides, job.discounts, time.time_ns() // 1_000_000)
    if kept is not None:
        planned = _kept_plan(kept, offers)
    else:
        plan = replace(plan_local(job, offers), ranks_have_room=resolved.have_room)
        planned = _Planned(plan=plan, printed=plan_dict(plan), screen=tuple(local_screen(job, plan)))
    check_budget(planned.plan)
    _print_plan(out, planned.screen, plan_lines(resolved, planned.plan) if explain else ())
    return planned


def _kept_plan(
    kept: _Kept, offers: Sequence[Offer], closed: Mapping[tuple[str, str], str] = MappingProxyType({})
) -> _Planned:
    """Return the kept plan at today's prices. Raises PlanChanged with everything that changed."""
    plan, changes = at_todays_prices(kept.plan, offers)
    of_nodes = {(slot.placement.cloud, slot.placement.region) for slot in kept.plan.plan.slots}
    shut = [
        ChangedField(field=" ".join(place), before="open", now=reason)
        for place, reason in closed.items()
        if place in of_nodes
    ]
    refuse_changes(kept.file, kept.plan, [*shut, *changes])
    moved = [f"  price of {change}" for change in moved_prices(kept.plan.plan, plan)]
    screen = (*kept.plan.screen, f"  As planned at {kept.plan.made_at}, in {kept.file}.", *moved)
    return _Planned(plan=plan, printed=plan_dict(plan), screen=screen)


def _write_plan(file: Path, checked: CheckedJob, fields: Mapping[str, Any], planned: _Planned) -> None:
    """Write the plan of a dry run to a file, for `--plan`. Raises Failure."""
    check_output(file)
    kept = KeptPlan(
        made_at=now_text(),
        command=shlex.join(typed()),
        job=str(checked.path.absolute()),
        folder=str(Path.cwd()),
        flags=dict(fields),
        values=checked.job.model_dump(mode="json"),
        plan=planned.plan,
        screen=planned.screen,
        longest_ms=planned.longest_ms,
        expected_micro_usd=None if planned.cost is None else planned.cost.expected,
        high_micro_usd=None if planned.cost is None else planned.cost.high,
    )
    with whole_file(file) as opened:
        opened.write(kept_plan_text(kept))


def _print_plan(out: Console, screen: Iterable[str], more: Iterable[str] = ()) -> None:
    """Print the plan on one screen, then `more`, if there is any, below a line."""
    for line in screen:
        out.print(line, highlight=False, markup=False, soft_wrap=True)
    for number, line in enumerate(more):
        out.print(line if number else f"\n{line}", highlight=False, markup=False, soft_wrap=True)


def _check_on_this_machine(checked: CheckedJob, out: Console, weights: Path | None) -> list[str]:
    """Check the job on this machine. Return its warnings, which are printed."""
    with working(out, TRYING) as say:
        report = preflight(checked, home(), start=weights, say=say)
    out.print("Checked: reward, prompts and disk.", highlight=False)
    warnings = list(report.get("warnings", ()))
    _print_warnings(out, warnings)
    return warnings


def _print_warnings(out: Console, warnings: Sequence[str]) -> None:
    for warning in warnings:
        out.print(f"Warning: {warning}.", highlight=False, markup=False, soft_wrap=True)


def _check_clouds(
    checked: CheckedJob, plan: Plan, out: Console, allow_old_prices: bool, weights: Path | None = None
) -> list[str]:
    """Check the job, prices, this machine and the clouds before buying. Return the warnings, which are printed.

    Raises Failure on a failed check.
    """
    from launcher.provision.provide import cloud_apis, ssh_from  # imports cloud libraries, unused by a local launch

    check_job(checked, plan.slots)
    if not allow_old_prices:
        check_prices(plan.slots, time.time_ns() // 1_000_000)
    check_here(checked, os.environ)
    warnings: list[str] = []
    if checked.job.model.path is not None:
        out.print("A model of this size is not loaded here, so the reward was not tried.", highlight=False)
    elif find_spec("torch") is not None:
        with working(out, TRYING) as say:
            warnings = list(ask_engine(checked, weights, say).get("warnings", ()))
        _print_warnings(out, warnings)
    else:
        out.print("The engine is not installed here, so reward and prompts were not tried.", highlight=False)
    places = {site.place for site in plan.sites}
    apis = cloud_apis(checked.job.clouds)
    check_named(checked.job, apis, places, lambda: ssh_from(checked.job))
    with working(out, "Asking the clouds: credentials, permissions, the bucket, the run's name"):
        callers = check_clouds(checked, apis, places)
    for cloud, caller in callers.items():
        out.print(f"Checked: {cloud} as {caller.identity} ({caller.account}), and its bucket.", highlight=False)
    return warnings


def _closed_regions(checked: CheckedJob, plan: Plan, out: Console) -> dict[tuple[str, str], str]:
    """Return the plan's regions in which no node may be bought, with the reason, unless no other region is left."""
    from launcher.provision.provide import cloud_apis

    places = {site.place for site in plan.sites}
    closed = closed_regions(cloud_apis(checked.job.clouds), places)
    if closed.keys() == places:
        return {}  # the checks that follow name the policy
    for (cloud, region), reason in sorted(closed.items()):
        out.print(f"{cloud} {region} is left out: {reason}.", highlight=False, markup=False, soft_wrap=True)
    return closed


def _prepare_folder(checked: CheckedJob, out: Console) -> None:
    """Write the facts that all cloud nodes of the run share (bundle, owners, SSH source) into the run's folder."""
    from launcher.provision.provide import cloud_apis, prepare_folder

    name = checked.job.name
    say = partial(out.print, highlight=False, markup=False, soft_wrap=True)
    prepare_folder(runs_folder() / name, checked.job, cloud_apis(checked.job.clouds), checked.workdir, say)


def check_budget(plan: Plan) -> None:
    """Refuse a plan above max_hourly, before the budget guard refuses the first purchase. Raises BudgetError."""
    limit, expected = plan.max_hourly_micro_usd, plan.expected_micro_usd_per_hour
    if limit is not None and expected > limit:
        raise BudgetError(
            f"the plan costs {hourly(expected)}, more than budget.max_hourly {hourly(limit)}; raise it "
            "(--max-hourly), or ask for fewer nodes (resources.rollout.num_nodes)"
        )


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


def _confirm(out: Console) -> None:
    if not can_ask():
        raise click.UsageError("nobody can be asked here; look at the plan, then add -y")
    confirm("Start it?", default=True, declined="Nothing was started.", err=out.stderr)


def _print_json(wanted: bool, value: dict[str, Any]) -> None:
    if wanted:
        click.echo(json.dumps(value, default=str))
