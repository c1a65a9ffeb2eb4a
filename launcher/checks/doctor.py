"""`spotrl doctor`: this machine and this installation on one screen, safe to paste into a bug report.

No line holds a secret, an account, a path, the name of the user or of the machine. Every text passes `without_names`,
and of keys and variables only the names are shown.
"""

import getpass
import os
import platform
import shutil
import socket
import sqlite3
import subprocess
import textwrap
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import replace
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import httpx
import psutil

from engine.installation import source
from launcher.checks.check import Check, CheckGroup, Verdict, run_checks
from launcher.checks.preflight import FREE_BYTES
from launcher.clouds.base import CloudApi, CloudRefused, LoginNeeded
from launcher.exit_codes import Failure
from launcher.market.offers import current_catalog
from launcher.settings import home, ledger_path
from launcher.without_secrets import SECRET_VARIABLE, secret_values, without_secrets

ASK_GPUS = ("nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader,nounits")
"""Prints one line a GPU: its name, its memory in MiB, and the driver."""

ASK_SECONDS = 10.0

NETWORK_SECONDS = 5.0
"""Longest time of one look at a server. All are looked at together."""

SERVERS = {
    "AWS": "https://ec2.us-east-1.amazonaws.com",
    "Google Cloud": "https://compute.googleapis.com",
    "Hugging Face hub": "https://huggingface.co",
}
"""Servers that a launch on clouds, or a model of the hub, needs. Any answer will do."""

PACKAGES = {
    "engine": ("torch", "diffusers", "transformers", "peft"),
    "clouds": ("skypilot", "boto3", "google-cloud-compute"),
    "others": ("ray", "uvicorn", "duckdb", "wandb", "mlflow-skinny", "scipy"),
}
"""Packages of extras whose versions matter, by the line that shows them."""

PROGRAMS = ("ssh", "rsync", "git", "gcloud", "nvidia-smi")

KEYS = (
    "AWS_ACCESS_KEY_ID",
    "AWS_PROFILE",
    "GOOGLE_APPLICATION_CREDENTIALS",
    "HF_TOKEN",
    "WANDB_API_KEY",
    "MLFLOW_TRACKING_URI",
    "HTTPS_PROXY",
)
"""Variables that clients read. Only whether they are set is shown."""


def doctor(
    clouds: Mapping[str, Callable[[], CloudApi]], commit: str, environ: Mapping[str, str] = os.environ
) -> list[Check]:
    """Return the lines of `spotrl doctor`. Asks the network and the clouds, and changes nothing.

    `clouds`: for each, a function that returns its API, or raises ImportError. `commit`: of spotrl's own code; empty
    if unknown.
    """
    groups: list[tuple[str, CheckGroup]] = [
        ("spotrl", partial(_one, partial(_spotrl, commit))),
        ("python", partial(_one, _python)),
        ("machine", partial(_one, _machine)),
        ("gpu", partial(_one, _gpu)),
        ("disk", partial(_one, _disk)),
        *((name, partial(_one, partial(_packages, name))) for name in PACKAGES),
        ("programs", partial(_one, _programs)),
        ("network", partial(_one, _network)),
        *((cloud, partial(_one, partial(_login, cloud, api))) for cloud, api in clouds.items()),
        ("keys", partial(_one, partial(_keys, environ))),
        ("settings", partial(_one, partial(_settings, environ))),
        ("prices", partial(_one, _prices)),
        ("ledger", partial(_one, _ledger)),
    ]
    hide = partial(without_names, environ=environ)
    return [replace(line, found=hide(line.found), remedy=hide(line.remedy)) for line in run_checks(groups)]


def without_names(text: str, environ: Mapping[str, str] = os.environ) -> str:
    """Return the text without secrets, paths of homes, and names of user and machine."""
    text = without_secrets(text, secret_values(environ, ()))
    with suppress(OSError, KeyError):
        user = getpass.getuser()
        places = {str(home()), str(Path.home()), environ.get("HOME", "")} - {"", "/"}
        for place in sorted(places, key=len, reverse=True):
            text = text.replace(place, "~")
        names = [(socket.gethostname(), "MACHINE"), (user, "USER")]
        for name, shown in names:
            if len(name) > 2 and name not in ("root", "localhost", "spotrl"):
                text = text.replace(name, shown)
    return text


def _one(ask: Callable[[], Check]) -> Iterable[Check]:
    return [ask()]


def _line(what: str, found: str, verdict: Verdict = Verdict.OK, remedy: str = "") -> Check:
    return Check(what=what, verdict=verdict, found=found, remedy=remedy)


def _spotrl(commit: str) -> Check:
    origin = f"a {source().kind}" if source().kind != "unknown" else "a source that is not recorded"
    return _line("spotrl", f"{version('spotrl')} from {origin}{f', commit {commit[:12]}' if commit else ''}")


def _python() -> Check:
    return _line(
        "python",
        f"{platform.python_version()} ({platform.python_implementation()}), {platform.libc_ver()[0]} "
        f"{platform.libc_ver()[1]}",
    )


def _machine() -> Check:
    gib = psutil.virtual_memory().total / (1 << 30)
    found = f"{platform.system()} {platform.release()} {platform.machine()}, {os.cpu_count()} cores, {gib:.0f} GiB"
    is_linux = platform.system() == "Linux"
    return _line(
        "machine", found, Verdict.OK if is_linux else Verdict.WARN, "" if is_linux else "local runs need Linux"
    )


def _gpu() -> Check:
    try:
        done = subprocess.run(ASK_GPUS, capture_output=True, text=True, timeout=ASK_SECONDS, check=True)
        rows = [[cell.strip() for cell in line.split(",")] for line in done.stdout.strip().splitlines()]
        counts = Counter((name, int(mebibytes), driver) for name, mebibytes, driver in rows)
    except FileNotFoundError:
        return _line("gpu", "none (no nvidia-smi); runs on this machine use the CPU")
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        return _line(
            "gpu", f"nvidia-smi fails ({type(error).__name__})", Verdict.WARN, "look at the driver: `nvidia-smi`"
        )
    found = [
        f"{n} x {name}, {mebibytes / 1024:.0f} GiB, driver {driver}" for (name, mebibytes, driver), n in counts.items()
    ]
    return _line("gpu", "; ".join(found) or "none; runs on this machine use the CPU")


def _disk() -> Check:
    existing = next(path for path in (home(), *home().parents) if path.exists())
    usage = shutil.disk_usage(existing)
    found = f"{usage.free / (1 << 30):,.1f} of {usage.total / (1 << 30):,.0f} GiB are free where runs are kept"
    if usage.free < FREE_BYTES:
        return _line("disk", found, Verdict.FAIL, "make room, or set SPOTRL_HOME to another disk")
    return _line("disk", found)


def _packages(line: str) -> Check:
    found, missing = [], []
    for package in PACKAGES[line]:
        try:
            found.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            missing.append(package)
    return _line(line, _with_missing(found, missing))


def _with_missing(present: Sequence[str], missing: Sequence[str]) -> str:
    parts = [", ".join(present), f"without {', '.join(missing)}" if missing else ""]
    return "; ".join(part for part in parts if part)


def _programs() -> Check:
    here = [program for program in PROGRAMS if shutil.which(program)]
    missing = [program for program in PROGRAMS if program not in here]
    return _line("programs", _with_missing(here, missing))


def _network() -> Check:
    def answers(address: str) -> bool:
        try:
            httpx.head(address, timeout=NETWORK_SECONDS)
        except (httpx.HTTPError, OSError, ValueError):
            return False
        return True

    with ThreadPoolExecutor(len(SERVERS)) as pool:
        reached = dict(zip(SERVERS, pool.map(answers, SERVERS.values()), strict=True))
    found = ", ".join(f"{name} {'answers' if is_there else 'does not answer'}" for name, is_there in reached.items())
    return _line("network", found, Verdict.OK if all(reached.values()) else Verdict.WARN)


def _login(cloud: str, api: Callable[[], CloudApi]) -> Check:
    """Return whether the cloud accepts the credentials here. The account and the identity are not shown."""
    try:
        api().caller()
    except ImportError:
        return _line(cloud, "not asked: its client is not installed (the extra `prices`)")
    except LoginNeeded:
        return _line(cloud, "no credentials that the cloud accepts", Verdict.WARN, "`spotrl check` names the login")
    except CloudRefused:
        return _line(cloud, "the credentials are refused", Verdict.WARN, "`spotrl check` says why")
    except Failure as failure:
        return _line(cloud, f"not known ({type(failure).__name__})", Verdict.WARN, "`spotrl check` says why")
    return _line(cloud, "the credentials are accepted")


def _keys(environ: Mapping[str, str]) -> Check:
    present = [name for name in KEYS if environ.get(name)]
    absent = [name for name in KEYS if name not in present]
    return _line("keys", f"set: {', '.join(present) or 'none'}; not set: {', '.join(absent) or 'none'}")


def _settings(environ: Mapping[str, str]) -> Check:
    names = sorted(name for name in environ if name.startswith("SPOTRL_") and not SECRET_VARIABLE.search(name))
    return _line("settings", f"set: {', '.join(names)}" if names else "no SPOTRL_ variable is set")


def _prices() -> Check:
    catalog = current_catalog(home() / "catalogs")
    oldest = min(table.fetched_at for table in catalog.tables.values())
    kind = "refreshed here" if (home() / "catalogs").exists() else "shipped with spotrl"
    return _line("prices", f"{kind}; the oldest table is of {oldest[:10]}")


def _ledger() -> Check:
    path = ledger_path()
    if not path.exists():
        return _line("ledger", "none yet")
    try:
        with closing(sqlite3.connect(f"{path.as_uri()}?mode=ro", uri=True)) as ledger:
            (runs,) = ledger.execute("SELECT count(*) FROM run").fetchone()
            (revision,) = ledger.execute("SELECT version_num FROM alembic_version").fetchone()
    except sqlite3.Error as error:
        return _line("ledger", f"cannot be read ({error})", Verdict.FAIL, "`spotrl ls` names the remedy")
    return _line("ledger", f"{runs} runs, version {revision}, {path.stat().st_size / 1e6:.1f} MB")


def screen(lines: Sequence[Check], width: int = 80) -> list[str]:
    """Return the lines as text of at most `width` columns, a long one in several."""
    shown = []
    for line in lines:
        mark = {Verdict.OK: " ", Verdict.WARN: "?", Verdict.FAIL: "!"}[line.verdict]
        text = f"{line.found}; {line.remedy}" if line.remedy else line.found
        head = f"{mark} {line.what:<9}"
        shown += textwrap.wrap(
            text, width, initial_indent=head, subsequent_indent=" " * len(head), break_on_hyphens=False
        )
    return shown
