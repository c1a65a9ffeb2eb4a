"""Fetch the wheels that the GPU checks need, for a machine that reaches no package index.

    python -m tests.gpu.wheels .whl [--have FILE] [--python 3.12] [--list]

The packages follow from the imports of the engine and of the checks, with everything those packages need. torch and its
CUDA packages are left out: the machine has them (torch 2.11 to 2.13). `--have FILE`: packages that the machine has too,
as `pip list --format=freeze` prints them there; only their names count. Versions are those of engine/versions.lock.
"""

import argparse
import ast
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from importlib.metadata import PackageNotFoundError, packages_distributions, requires
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
LOCK = ROOT / "engine" / "versions.lock"

START = ("engine", "tests/gpu", "tests/conftest.py")
"""Where the imports begin. Modules of this repository that they import are followed."""

OURS = ("engine", "launcher", "tests", "catalogs", "sky_yamls")

WITH_TORCH = ("torch", "triton")
"""Packages of the machine. With them go the packages that only they need."""

PYTEST = ("pytest", "pytest-timeout", "pytest-xdist", "hypothesis")
"""Packages of pytest's configuration, which no module imports."""

OPTIONAL = ("ray", "boto3", "botocore", "google", "sky")
"""Packages that the checks do without: Ray's check is skipped, and no check calls a cloud."""

MANYLINUX = ("1", "2014", "_2_17", "_2_24", "_2_26", "_2_27", "_2_28", "_2_31", "_2_34", "_2_35")
"""Tags of Linux wheels for x86-64. pip matches each one exactly."""


def imported(start: Iterable[str] = START, root: Path = ROOT) -> set[str]:
    """Return the top-level names of other people's packages that the code imports, directly or through our modules."""
    waiting = [path for name in start for path in _files(root / name)]
    seen, found = set(waiting), set()
    while waiting:
        for module in _modules(waiting.pop()):
            top = module.partition(".")[0]
            if top not in OURS:
                found.add(top)
                continue
            for path in _source(root, module):
                if path not in seen:
                    seen.add(path)
                    waiting.append(path)
    return found - sys.stdlib_module_names


def _files(path: Path) -> Iterator[Path]:
    yield from path.rglob("*.py") if path.is_dir() else [path]


def _modules(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _source(root: Path, module: str) -> Iterator[Path]:
    """Return the module's file, and the `__init__` files of the packages above it."""
    parts = module.split(".")
    for count in range(1, len(parts) + 1):
        path = root.joinpath(*parts[:count])
        yield from (file for file in (path / "__init__.py", path.with_suffix(".py")) if file.is_file())


def needed(names: Iterable[str], without: Iterable[str] = ()) -> set[str]:
    """Return the distributions of the imported names and all that those need, without torch's and without `without`.

    Reads the requirements of the installed packages, so run it in an environment where the engine runs.
    """
    by_name = packages_distributions()
    left_out = {canonicalize_name(name) for name in (*WITH_TORCH, *OPTIONAL, *without)}
    waiting = [canonicalize_name(one) for name in names if name not in OPTIONAL for one in by_name.get(name, ())]
    waiting += [canonicalize_name(name) for name in PYTEST]
    found: set[str] = set()
    while waiting:
        name = waiting.pop()
        if name in found or name in left_out or name.startswith("nvidia-"):
            continue
        found.add(name)
        waiting.extend(_requirements(name))
    return found


def _requirements(name: str) -> Iterator[str]:
    try:
        lines = requires(name) or []
    except PackageNotFoundError:
        return
    for requirement in map(Requirement, lines):
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            yield canonicalize_name(requirement.name)


def pinned(names: Iterable[str], lock: Path = LOCK) -> list[str]:
    """Return `name==version` by the lock, sorted. A package that is not locked has no version."""
    lines = [line.strip() for line in lock.read_text("utf-8").splitlines() if "==" in line]
    versions = {canonicalize_name(name): version for name, _, version in (line.partition("==") for line in lines)}
    return sorted(f"{name}=={versions[name]}" if name in versions else name for name in names)


def main(arguments: Sequence[str]) -> int:
    """Fetch the wheels into a folder, or list the packages."""
    options = argparse.ArgumentParser(description="Fetch the wheels of the GPU checks.")
    options.add_argument("folder", type=Path, nargs="?", default=Path(".whl"))
    options.add_argument("--have", type=Path, help="packages of the machine: the output of pip list --format=freeze")
    options.add_argument("--python", default="3.12", help="Python of the machine")
    options.add_argument("--list", action="store_true", help="print the packages and fetch nothing")
    given = options.parse_args(arguments)
    lines = given.have.read_text("utf-8").splitlines() if given.have else []
    packages = pinned(needed(imported(), (line.partition("==")[0].strip() for line in lines if line.strip())))
    if given.list:
        print(*packages, sep="\n")
        return 0
    platforms = [part for tag in MANYLINUX for part in ("--platform", f"manylinux{tag}_x86_64")]
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
    command += ["--python-version", given.python, "--implementation", "cp", *platforms]
    done = subprocess.run([*command, "--dest", str(given.folder), *packages], check=False)
    if done.returncode == 0:
        size = sum(wheel.stat().st_size for wheel in given.folder.glob("*.whl"))
        print(f"{len(packages)} wheels, {size / 2**20:.0f} MiB, are in {given.folder}")
    return done.returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
