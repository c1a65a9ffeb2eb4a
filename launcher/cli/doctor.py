"""`spotrl doctor`: this machine and this installation, for a bug report."""

import json
from dataclasses import asdict
from functools import partial
from importlib.resources import files
from pathlib import Path

import click

from launcher.checks.check import ending
from launcher.checks.doctor import doctor as lines_of_doctor
from launcher.checks.doctor import screen
from launcher.clouds.base import CloudApi
from launcher.exit_codes import ExitCode
from launcher.market.offers import CLOUDS
from launcher.runs.start_command import commit_of_code


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def doctor(as_json: bool) -> ExitCode:
    """Show this machine and this installation, for a bug report.

    One screen: versions, GPU, disk, network, clouds, keys. The lines hold no secret, account, path, user name or
    machine name: of keys only whether they are set. The command changes nothing. `spotrl check` names what a launch
    on clouds lacks, with remedies.

    \b
    Example:
      spotrl doctor
      spotrl doctor --json > doctor.json
    """
    clouds = {cloud: partial(_api, cloud) for cloud in CLOUDS}
    lines = lines_of_doctor(clouds, commit_of_code(Path(str(files("launcher"))).parent))
    code = ending(lines)
    if as_json:
        click.echo(json.dumps({"exit_code": int(code), "checks": [asdict(line) for line in lines]}))
    else:
        click.echo("\n".join(screen(lines)))
    return code


def _api(cloud: str) -> CloudApi:
    from launcher.provision.provide import cloud_apis  # imports cloud libraries, which may be missing

    return cloud_apis([cloud])[cloud]
