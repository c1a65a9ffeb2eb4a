"""The pinned packages of a node: `python -m tests.launcher.node_lock > engine/node.lock`.

The program follows the requirements of the extra `node` through the packages installed here, so that a node runs the
versions that were tested. `uv pip compile` (pip install uv) adds what torch needs on Linux, and the hashes of each
package's files for every Python and architecture. A test compares the versions.
"""

import re
import subprocess
import tomllib
from collections.abc import Iterator
from importlib.metadata import distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).parents[2]

HEAD = """\
# Exact versions of what a node runs (extra `node`), as the tests ran them, with what torch needs for CUDA.
# A node installs no file whose hash is not here. Made by: python -m tests.launcher.node_lock > engine/node.lock
"""

COMPILE = ("uv", "pip", "compile", "--quiet", "--no-config", "--no-header", "--no-annotate", "--generate-hashes")
UNIVERSAL = ("--universal", "--python-version", "3.11")


def node_pins() -> list[str]:
    """Return `NAME==VERSION` of each package of a node that is installed here, as engine/node.lock spells it."""
    seen: set[tuple[str, str]] = set()
    pins: dict[str, str] = {}
    todo = [(requirement, "") for requirement in _ours("node")]
    while todo:
        requirement, extra = todo.pop()
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": extra}):
            continue
        name = canonicalize_name(requirement.name)
        found = distribution(name)
        # Without "+cpu": the node's package index decides which build of the version it gets.
        pins[name] = f"{name}=={Version(found.version).public}"
        for wanted in ("", *requirement.extras):
            if (name, wanted) not in seen:
                seen.add((name, wanted))
                todo += [(Requirement(text), wanted) for text in found.requires or ()]
    return [pins[name] for name in sorted(pins)]


def pins_in(lock: str) -> list[str]:
    """Return `NAME==VERSION` of each requirement of a lock, without markers and hashes."""
    return re.findall(r"^[\w.-]+==[\w.+]+", lock, re.MULTILINE)


def _ours(extra: str) -> Iterator[Requirement]:
    """Return our own requirements with an extra from pyproject.toml, because the installed package may be older."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    yield from map(Requirement, project["dependencies"])
    todo, seen = [extra], set()
    while todo:
        name = todo.pop()
        if name in seen:
            continue
        seen.add(name)
        for requirement in map(Requirement, project["optional-dependencies"][name]):
            if canonicalize_name(requirement.name) == project["name"]:
                todo += requirement.extras
            else:
                yield requirement


if __name__ == "__main__":
    pins = "\n".join(node_pins())
    compiled = subprocess.run([*COMPILE, *UNIVERSAL, "-"], input=pins, stdout=subprocess.PIPE, text=True, check=True)
    print(HEAD + compiled.stdout, end="")
