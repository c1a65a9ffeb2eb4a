"""`spotrl check`: find the problems of a launch on real clouds before buying."""

import json
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

import click
from pydantic import TypeAdapter, ValidationError

from launcher.checks.check import Check, CheckGroup, Verdict, ending, failed, run_checks
from launcher.checks.spotrl_check import of_clouds, of_job, of_selftest, one_will_do, without_a_job
from launcher.cli.launch import overrides
from launcher.cli.layout import print_table
from launcher.clouds.limits import CloudLimits, build_limits
from launcher.clouds.preempting import build_preempter
from launcher.controller.lease import is_held
from launcher.exit_codes import ExitCode, Failure
from launcher.job.checked import CheckedJob, JobError
from launcher.job.company import NOTHING_NAMED, Named
from launcher.job.load import load_job
from launcher.job.values import Infra
from launcher.ledger.models import LOCAL
from launcher.ledger.store import open_ledger
from launcher.market.offers import CLOUDS, current_catalog
from launcher.placement.plan import Plan
from launcher.settings import config_path, home, ledger_path, runs_folder


@click.command()
@click.argument("job", type=click.Path(path_type=Path), required=False)
@click.option("--infra", help="Clouds to check, like aws,gcp (default: the job's clouds; without JOB, all).")
@click.option("--name", help="Name of the run (default: the job's).")
@click.option("--max-total", help="Budget of the run in dollars, like 40 or '$40'.")
@click.option("--max-hourly", help="Limit on the total price of the run's nodes, in dollars per hour, like 8.")
@click.option(
    "--set",
    "settings",
    multiple=True,
    metavar="FIELD=VALUE",
    help="Set a field of the job, like checkpoint.every=2. Repeatable.",
)
@click.option(
    "--print-policy",
    "policy",
    type=click.Choice(CLOUDS),
    help="Print the minimal permissions for your credentials on this cloud, and check nothing.",
)
@click.option("--selftest", is_flag=True, help="Check or print also what `spotrl selftest` needs to preempt a node.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def check(
    job: Path | None,
    infra: str | None,
    name: str | None,
    max_total: str | None,
    max_hourly: str | None,
    settings: tuple[str, ...],
    policy: str | None,
    selftest: bool,
    as_json: bool,
) -> ExitCode:
    """Check whether JOB can run on real clouds. Nothing is bought.

    The command checks credentials, permissions, quotas, prices, buckets and this machine's clock. Without JOB, the
    command checks the requirements of every job. Exit code 0: OK, perhaps with warnings; 4: credentials or
    permissions; 3: the job; 1: any other problem.

    \b
    Example:
      spotrl check
      spotrl check qwen_image_ocr.yaml --infra aws,gcp
      spotrl check --print-policy aws > policy.json
      spotrl check --selftest --infra aws
    """
    if policy is not None:
        _print_policy(policy, job, selftest)
        return ExitCode.OK
    flags = {"infra": infra, "name": name, "max_total": max_total, "max_hourly": max_hourly}
    if job is None:
        clouds = _named(infra) if infra else CLOUDS
        more = of_selftest(map(build_preempter, clouds)) if selftest else []
        checks = run_checks([*without_a_job(), *_clouds(clouds), *more])
        return _end(checks if infra else one_will_do(checks), as_json)
    try:
        checked = load_job(job, overrides(flags, settings), environ=os.environ, user_config=config_path())
    except JobError as error:
        return _end([*run_checks(without_a_job()), failed("job", error)], as_json)
    if not checked.job.clouds:
        found = (
            f"{checked.job.name} runs on this machine, which needs no cloud; `spotrl launch {job} --dry-run` checks it"
        )
        return _end([Check(what="job", verdict=Verdict.OK, found=found)], as_json)
    return _end(_on_clouds(checked, selftest), as_json)


def _named(infra: str) -> Sequence[str]:
    """Return the clouds that `--infra` names. Raises click.UsageError for other words, and for this machine."""
    try:
        names = str(TypeAdapter(Infra).validate_python(infra))
    except ValidationError as error:
        raise click.UsageError(f"--{error.errors()[0]['ctx']['error']}") from None
    if names == LOCAL:
        raise click.UsageError("--infra is local, which needs no cloud; `spotrl launch JOB --dry-run` checks a job")
    return names.split(",")


def _on_clouds(checked: CheckedJob, selftest: bool) -> list[Check]:
    limits = {cloud: build_limits(cloud) for cloud in checked.job.clouds}
    named = {cloud: checked.job.named_on(cloud) for cloud in checked.job.clouds}
    asks = [*without_a_job(), *_clouds(checked.job.clouds, limits, named)]
    asks += of_selftest(map(build_preempter, checked.job.clouds)) if selftest else []
    try:
        plan = _plan(checked)
    except Failure as failure:  # without a plan, the job has no regions to check
        return [*run_checks(asks), failed("plan", failure)]
    from launcher.provision.provide import cloud_apis, ssh_from

    mine = of_job(
        checked,
        plan,
        limits,
        apis=cloud_apis(checked.job.clouds),
        runs=runs_folder(),
        now_ms=_now_ms,
        ssh_from=lambda: ssh_from(checked.job),
    )
    return run_checks([*asks, *mine])


def _clouds(
    clouds: Sequence[str], limits: dict[str, CloudLimits] | None = None, named: Mapping[str, Named] | None = None
) -> list[tuple[str, CheckGroup]]:
    from launcher.provision.provide import cloud_apis

    limits = limits or {cloud: build_limits(cloud) for cloud in clouds}
    return of_clouds(cloud_apis(clouds), limits, _now_ms, named=named or {})


def _plan(checked: CheckedJob) -> Plan:
    from launcher.job.resolved import resolve_checked
    from launcher.services.fleets import with_fleet_chosen
    from launcher.services.planning import cloud_plan  # imports numpy and the planner

    sessions, catalog, now_ms = open_ledger(ledger_path(), is_held), current_catalog(home() / "catalogs"), _now_ms()
    checked, _ = with_fleet_chosen(sessions, checked, catalog, now_ms)
    return cloud_plan(sessions, resolve_checked(checked), catalog, now_ms).as_plan()


def _now_ms() -> int:
    return time.time_ns() // 1_000_000


def _end(checks: Sequence[Check], as_json: bool) -> ExitCode:
    code = ending(checks)
    if as_json:
        click.echo(json.dumps({"exit_code": int(code), "checks": [asdict(one) for one in checks]}))
        return code
    texts = [f"{one.found}; {one.remedy}" if one.remedy else one.found for one in checks]
    rows = [(one.what, one.verdict.value, text) for one, text in zip(checks, texts, strict=True)]
    print_table([("check", "", "found, and what to do"), *rows], sentences=True)
    bad = sum(one.verdict is Verdict.FAIL for one in checks)
    odd = sum(one.verdict is Verdict.WARN for one in checks)
    click.echo(f"{len(checks)} checks: {bad} failed, {odd} to look at.")
    return code


def _print_policy(cloud: str, job: Path | None, selftest: bool) -> None:
    """Print the policy alone on stdout, so the output can go to a file. Print notes on the AWS policy on stderr."""
    from launcher.clouds.aws_role import node_policy
    from launcher.clouds.policies import AWS_NAMED_NOTES, AWS_NOTES, BUCKETS, aws_policy, gcp_role
    from launcher.clouds.selftest_policies import SIMULATE, fis_notes, fis_statements

    loaded = load_job(job, environ=os.environ, user_config=config_path()).job if job else None
    named = loaded.named_on(cloud) if loaded else NOTHING_NAMED
    if cloud == "gcp":
        click.echo(gcp_role(named) + (f"- {SIMULATE}\n" if selftest else ""), nl=False)
        return
    buckets = [*loaded.store.values()] if loaded else []
    policy = aws_policy(buckets=buckets or BUCKETS, named=named)
    policy["Statement"] += fis_statements() if selftest else []
    click.echo(json.dumps(policy, indent=2))
    click.echo(AWS_NOTES + (fis_notes() if selftest else ""), nl=False, err=True)
    if named.identity:
        click.echo(AWS_NAMED_NOTES.format(identity=named.identity), nl=False, err=True)
        click.echo(json.dumps(node_policy(None, buckets or BUCKETS), indent=2), err=True)
