"""A planted bug: its name, the missing behaviour, and the code that plants and removes it."""

import inspect
import sys
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any

EVERYWHERE = ""
"""Name in a patch of a function that is replaced in its own module and in every module that has imported it."""


@dataclass(frozen=True, kw_only=True)
class PlantedBug:
    """`patches`: (where, name, replacement)."""

    name: str
    forgets: str
    patches: tuple[tuple[Any, str, Any], ...]

    @contextmanager
    def planted(self) -> Iterator[None]:
        patches = [one for patch in self.patches for one in _resolved(*patch)]
        before = [(where, name, vars(where)[name]) for where, name, _ in patches]
        for where, name, instead in patches:
            setattr(where, name, instead)
        try:
            yield
        finally:
            for where, name, there in before:
                setattr(where, name, there)


def changed(function: Callable[..., Any], old: str, new: str) -> Callable[..., Any]:
    """Return a copy of the function with `old`, which its source contains once, replaced by `new`."""
    source = textwrap.dedent(inspect.getsource(function))
    assert source.count(old) == 1, f"{function.__qualname__} has {source.count(old)} times: {old}"
    made: dict[str, Any] = {}
    exec(compile(source.replace(old, new), f"<{function.__name__}, planted>", "exec"), function.__globals__, made)
    return made[function.__name__]


def everywhere(function: Callable[..., Any], instead: Callable[..., Any]) -> tuple[Any, str, Any]:
    """Return a patch that replaces a function wherever it is called by its name."""
    return function, EVERYWHERE, instead


def _resolved(where: Any, name: str, instead: Any) -> Iterator[tuple[Any, str, Any]]:
    """Yield the patches of single names. A module that is imported later takes the function from its own module."""
    if name != EVERYWHERE:
        yield where, name, instead
        return
    modules = [module for module in list(sys.modules.values()) if isinstance(module, ModuleType)]
    ours = [module for module in modules if module.__name__.partition(".")[0] in ("engine", "launcher")]
    for module in ours:
        yield from ((module, key, instead) for key, value in list(vars(module).items()) if value is where)
