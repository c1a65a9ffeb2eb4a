"""Where this spotrl was installed from, and the command that adds an extra to it.

spotrl is on no package index, and anybody could register its name there. So no command names `spotrl` alone: it names
the clone, the wheel or the repository that this installation came from, or else the extra's own packages.
"""

import json
import re
import shlex
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from importlib.util import find_spec
from pathlib import Path
from typing import Literal
from urllib.parse import unquote, urlsplit

NAME = "spotrl"

_EXTRA = re.compile(r"""\bextra\s*==\s*['"](?P<extra>[\w.-]+)['"]""")

_OURS = re.compile(rf"{NAME}\[(?P<extras>[\w,.-]+)\]")


@dataclass(frozen=True, kw_only=True, slots=True)
class InstallSource:
    """Source of an installation. `place`: a folder or an address; empty if unknown."""

    kind: Literal["clone", "folder", "wheel", "repository", "unknown"]
    place: str = ""


def source(root: Path = Path(__file__).parent.parent, installed: Distribution | None = None) -> InstallSource:
    """Return the source of this installation. `root`: the folder of our packages.

    `installed`: what is recorded about the installation (PEP 610); None: look it up.
    """
    if (root / "pyproject.toml").is_file():
        return InstallSource(kind="clone", place=str(root))
    try:
        record = json.loads((installed or distribution(NAME)).read_text("direct_url.json") or "{}")
    except (PackageNotFoundError, ValueError):
        record = {}
    address = str(record.get("url", ""))
    if "vcs_info" in record:
        vcs, commit = record["vcs_info"].get("vcs", "git"), record["vcs_info"].get("commit_id", "")
        return InstallSource(kind="repository", place=f"{vcs}+{address}@{commit}".removesuffix("@"))
    parts = urlsplit(address)
    path = Path(unquote(parts.path))
    if parts.scheme == "file" and path.exists():
        return InstallSource(kind="folder" if path.is_dir() else "wheel", place=str(path))
    if parts.scheme in ("http", "https"):
        return InstallSource(kind="wheel", place=address)
    return InstallSource(kind="unknown")


def install_command(extra: str, origin: InstallSource | None = None) -> str:
    """Return a shell command that installs an extra for this Python. `origin`: None: look it up."""
    origin = origin or source()
    match origin.kind:
        case "clone":
            words = ["-e", f"{origin.place}[{extra}]"]
        case "folder":
            words = [f"{origin.place}[{extra}]"]
        case "wheel" if not origin.place.startswith("http"):
            words = [f"{origin.place}[{extra}]"]
        case "wheel" | "repository":
            words = [f"{NAME}[{extra}] @ {origin.place}"]
        case "unknown":
            words = packages_of(extra)
    return shlex.join([*_pip_install(), *words])


def packages_of(extra: str, requirements: Sequence[str] | None = None) -> list[str]:
    """Return the packages of an extra, with those of the extras that it names.

    `requirements`: all of the installed package; None: look them up.
    """
    if requirements is None:
        try:
            requirements = distribution(NAME).requires or ()
        except PackageNotFoundError:
            requirements = ()
    packages = []
    for requirement in requirements:
        package, _, marker = requirement.partition(";")
        match = _EXTRA.search(marker)
        if match is None or match["extra"] != extra:
            continue
        if inner := _OURS.match(package):
            for name in inner["extras"].split(","):
                packages += packages_of(name, requirements)
        else:
            packages.append(package.strip())
    return packages


def _pip_install() -> list[str]:
    """Return the words that install into this Python's environment: short if the shell finds that environment's pip."""
    python, pip = sys.executable, shutil.which("pip")
    if pip is not None and Path(pip).parent == Path(python).parent:
        return ["pip", "install"]
    uv = shutil.which("uv") if find_spec("pip") is None else None
    return [python, "-m", "pip", "install"] if uv is None else ["uv", "pip", "install", "--python", python]
