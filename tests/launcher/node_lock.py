"""What a node is installed from, pinned: `python -m tests.launcher.node_lock > engine/node.lock`.

Walks the requirements of the extra `node` through what is installed here, so that a node runs the versions that the
tests ran. A test holds the file against a new walk.
"""

import tomllib
from collections.abc import Iterator
from importlib.metadata import distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).parents[2]

HEAD = """\
# Exact versions of what a node runs (extra `node`), as the tests ran them; constraints for the set-up of a node.
# Made by: python -m tests.launcher.node_lock > engine/node.lock
# No CUDA libraries: which ones torch needs, and their exact versions, its own wheel says.
"""


def node_lock() -> str:
    """The text of engine/node.lock for what is installed now."""
    seen: set[tuple[str, str]] = set()
    pins: dict[str, str] = {}
    todo = [(requirement, "") for requirement in _ours("node")]
    while todo:
        requirement, extra = todo.pop()
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": extra}):
            continue
        name = canonicalize_name(requirement.name)
        found = distribution(name)
        # Without "+cpu": which build of the version a node gets is its index's matter.
        pins[name] = f"{found.metadata['Name']}=={Version(found.version).public}"
        for wanted in ("", *requirement.extras):
            if (name, wanted) not in seen:
                seen.add((name, wanted))
                todo += [(Requirement(text), wanted) for text in found.requires or ()]
    return HEAD + "".join(f"{pins[name]}\n" for name in sorted(pins))


def _ours(extra: str) -> Iterator[Requirement]:
    """Our own requirements with an extra: from pyproject.toml, because what is installed may be older."""
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
    print(node_lock(), end="")
