"""`spotrl ssh`: open a shell or run one command on a node of a run."""

import json
import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click
from sqlalchemy.orm import Session, sessionmaker

from launcher.cli.run_argument import run_argument
from launcher.exit_codes import Failure
from launcher.ledger.models import LOCAL, Node
from launcher.ledger.store import check_kept, find_run, nodes_of
from launcher.provision.local.provisioner import node_folder
from launcher.runs.views import short_name

MACHINE = "machine.json"
"""File in the node's local folder with the provisioner's record of the instance, including the login."""


@click.command(context_settings={"ignore_unknown_options": True})
@run_argument
@click.argument("node_name", metavar="NODE")
@click.argument("command", nargs=-1, type=click.UNPROCESSED, metavar="[-- COMMAND]")
@click.option(
    "--json",
    "as_json",
    is_flag=True,
    help="Print one JSON object: the result of COMMAND, or without COMMAND the login.",
)
@click.pass_obj
def ssh(
    sessions: sessionmaker[Session], run_name: str, node_name: str, command: tuple[str, ...], as_json: bool
) -> int | None:
    """Open a shell on NODE of RUN, or run COMMAND on NODE.

    NODE is a node's name, with or without the name of the run, or a slot (`trainer`, `spot-0`). A slot means the
    newest node of the slot. The node's files are in ~/spotrl on the node. The exit code is the exit code of ssh.

    With --json and COMMAND, the output is the command's exit code, stdout and stderr. With --json alone, the output
    is the node's address and the ssh command for the login. A node on this machine (infra local) has a folder and
    accepts no COMMAND.

    \b
    Example:
      spotrl ssh digits trainer
      spotrl ssh digits spot-0 -- nvidia-smi
      spotrl ssh digits spot-0 --json -- nvidia-smi
    """
    with sessions() as session:
        run = find_run(session, run_name)
        check_kept(session, run)
        node = newest(run_name, nodes_of(session, run), node_name)
    folder = node_folder(Path(run.folder), node.name)
    if run.infra == LOCAL:
        found = f"{node.name} is a process group of this machine; its disk is the folder {folder}"
        if command:
            raise Failure(f"{found}; run {command[0]} there yourself")
        click.echo(json.dumps({"node": node.name, "folder": str(folder)}) if as_json else found)
        return None
    login = login_of(node.name, folder)
    arguments = ssh_command(login, folder, command)
    if as_json and not command:
        address = {name: login.get(name) for name in ("host", "user", "port", "key")}
        click.echo(json.dumps({"node": node.name, **address, "ssh": arguments}))
        return None
    if shutil.which("ssh") is None:
        raise Failure("ssh cannot be found here; install it (Debian: `apt-get install openssh-client`)")
    if not as_json:
        os.execvp(arguments[0], arguments)
    done = subprocess.run(arguments, capture_output=True, text=True, errors="replace", check=False)
    ended = {"exit_code": done.returncode, "stdout": done.stdout, "stderr": done.stderr}
    click.echo(json.dumps({"node": node.name, "command": command, **ended}))
    return done.returncode


def newest(run_name: str, nodes: Sequence[Node], wanted: str) -> Node:
    """Return the node named `wanted`, or the newest node of the slot `wanted`.

    Raises LookupError with the names of the run's slots.
    """
    named = [node for node in nodes if wanted in (node.name, node.slot, short_name(run_name, node.name))]
    if not named:
        known = ", ".join(dict.fromkeys(node.slot for node in nodes)) or "none yet"
        raise LookupError(f"{run_name} has no node called {wanted}; it has had: {known}")
    return max(named, key=lambda node: node.generation)


def login_of(name: str, folder: Path) -> Mapping[str, Any]:
    """Return the login written by the provisioner. Raises Failure if the node has ended or has no login yet."""
    if (folder / "ended.json").exists():
        raise Failure(f"{name} has ended; `spotrl logs` shows what it wrote, and `spotrl status` which nodes there are")
    try:
        login = json.loads((folder / MACHINE).read_text("utf-8"))["login"]
    except FileNotFoundError:
        raise Failure(f"{name} has no machine yet; `spotrl status` shows when it has") from None
    except (ValueError, KeyError, TypeError):
        raise Failure(f"{folder / MACHINE} does not say how to log in; try again when the node is up") from None
    if not isinstance(login, dict) or not all(login.get(key) for key in ("host", "user", "key")):
        raise Failure(f"{folder / MACHINE} does not say how to log in yet; try again when the node is up")
    return login


def ssh_command(login: Mapping[str, Any], folder: Path, command: Sequence[str]) -> list[str]:
    """Return the ssh command line.

    The node's host key is accepted on the first login and kept in the node's own folder, because clouds reuse
    addresses.
    """
    options = {
        "IdentitiesOnly": "yes",
        "IdentityAgent": "none",
        "StrictHostKeyChecking": "accept-new",
        "UserKnownHostsFile": f'"{login.get("known_hosts") or folder / "known_hosts"}"',
        "GlobalKnownHostsFile": "/dev/null",
        "LogLevel": "ERROR",
        **({"ProxyCommand": str(login["proxy"])} if login.get("proxy") else {}),
    }
    words = [word for name, value in options.items() for word in ("-o", f"{name}={value}")]
    # Ignore the user's ssh configuration and ssh agent: both are for the user's own machines, not for nodes.
    port = str(login.get("port") or 22)
    ssh = ["ssh", "-F", "none", "-a", "-x", "-i", str(login["key"]), "-p", port, *words]
    return [*ssh, f"{login['user']}@{login['host']}", *(["--", *command] if command else [])]
