"""Check this machine: programs, SkyPilot and its configuration, and the SSH source address."""

import shutil
from collections.abc import Callable, Iterable, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from engine.installation import install_command
from launcher.checks.check import Check, Verdict
from launcher.checks.ready import PROGRAMS
from launcher.checks.sky_settings import configuration_files, read_configuration, value_at

SKYPILOT = "0.14.1"
"""The SkyPilot version used by the tests."""

IN_THE_WAY: Mapping[tuple[str, ...], str] = {
    ("admin_policy",): "may change what is bought",
    ("allowed_clouds",): "the job's clouds have to be among them",
    ("api_server", "endpoint"): "that server buys, with its own credentials and its own environment",
    ("aws", "vpc_name"): "nodes are in that network, and our group is in the default one, so no node starts",
    ("aws", "vpc_names"): "nodes are in one of those networks, and our group is in the default one, so no node starts",
    ("aws", "subnet_names"): "nodes are in those subnets; they need public addresses",
    ("aws", "use_internal_ips"): "nodes get no public address, and this machine has to reach them without",
    ("aws", "ssh_proxy_command"): "only SkyPilot would use it; we log in to a node's public address",
    ("aws", "remote_identity"): "ours is used instead, with the request",
    ("aws", "security_group_name"): "ours is used instead, with the request",
    ("gcp", "subnet_names"): "nodes are in those subnets and not in the run's own network, so no node starts",
    ("gcp", "use_internal_ips"): "nodes get no public address, and this machine has to reach them without",
    ("gcp", "ssh_proxy_command"): "only SkyPilot would use it; we log in to a node's public address",
    ("gcp", "remote_identity"): "ours is used instead, with the request",
    ("gcp", "vpc_name"): "ours is used instead, with the request",
}
"""Keys of the user's own SkyPilot configuration, with their effect on our nodes."""

OF_NETWORKS = ("vpc_name", "vpc_names", "subnet_names", "use_internal_ips", "ssh_proxy_command")
"""Keys that a job's `network` sets for its nodes, overriding the user's configuration."""


def programs() -> list[Check]:
    missing = [program for program in PROGRAMS if shutil.which(program) is None]
    if missing:
        remedy = "install it (Debian: `apt-get install openssh-client rsync`)"
        return [
            Check(what="programs", verdict=Verdict.FAIL, found=f"no {' and no '.join(missing)} here", remedy=remedy)
        ]
    return [Check(what="programs", verdict=Verdict.OK, found=", ".join(PROGRAMS))]


def skypilot(installed: Callable[[str], str] = version) -> list[Check]:
    try:
        installed_version = installed("skypilot")
    except PackageNotFoundError:
        remedy = f"`{install_command('sky')}`"
        return [Check(what="skypilot", verdict=Verdict.FAIL, found="SkyPilot is not installed here", remedy=remedy)]
    if installed_version != SKYPILOT:
        remedy = f"`pip install 'skypilot[aws,gcp]=={SKYPILOT}'`, or watch the first launch"
        return [
            Check(
                what="skypilot",
                verdict=Verdict.WARN,
                found=f"{installed_version}; tested with {SKYPILOT}",
                remedy=remedy,
            ),
        ]
    return [Check(what="skypilot", verdict=Verdict.OK, found=installed_version)]


def skypilot_config(environ: Mapping[str, str], folder: Path) -> list[Check]:
    """Check the user's own SkyPilot configuration for keys that change our nodes. The file is read, never written."""
    files = configuration_files(environ, folder)
    checks = [check for path in files for check in _keys_in_the_way(path)]
    return checks or [Check(what="skypilot config", verdict=Verdict.OK, found="nothing in it is in the way")]


def _keys_in_the_way(path: Path) -> Iterable[Check]:
    from ruamel.yaml.error import YAMLError

    try:
        values = read_configuration(path)
    except (YAMLError, OSError, UnicodeDecodeError) as error:
        first = next(iter(str(error).splitlines()), "")
        yield Check(what="skypilot config", verdict=Verdict.WARN, found=f"{path} cannot be read ({first})")
        return
    for key, means in IN_THE_WAY.items():
        if (value := value_at(values, key)) is not None:
            in_job = ", or name the network in the job (`network:`)" if key[1:] and key[1] in OF_NETWORKS else ""
            remedy = f"take it out of {path} if that is not what you mean{in_job}"
            remedy = "" if means.startswith("ours is used") else remedy
            yield Check(
                what="skypilot config",
                verdict=Verdict.WARN,
                found=f"{'.'.join(key)} is {value!r}: {means}",
                remedy=remedy,
            )


def address(ask: Callable[[], str]) -> list[Check]:
    """Return the line with the addresses that may reach nodes by SSH. Nodes accept no other connection from outside."""
    source = ask()
    text = f"{source} may reach nodes by SSH, and nothing else" if source else "the network that the job names decides"
    return [Check(what="ssh from", verdict=Verdict.OK, found=text)]
