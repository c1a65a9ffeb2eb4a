"""A bug that tests plant: its name, what it forgets, and the code that puts it in place and takes it out again."""

import inspect
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class PlantedBug:
    """`patches`: (where, name, what stands there instead)."""

    name: str
    forgets: str
    patches: tuple[tuple[Any, str, Any], ...]

    @contextmanager
    def planted(self) -> Iterator[None]:
        before = [(where, name, vars(where)[name]) for where, name, _ in self.patches]
        for where, name, instead in self.patches:
            setattr(where, name, instead)
        try:
            yield
        finally:
            for where, name, there in before:
                setattr(where, name, there)


def changed(function: Callable[..., Any], old: str, new: str) -> Callable[..., Any]:
    """Return a copy of the function in whose source `old`, which is there once, is `new`."""
    source = textwrap.dedent(inspect.getsource(function))
    assert source.count(old) == 1, f"{function.__qualname__} has {source.count(old)} times: {old}"
    made: dict[str, Any] = {}
    exec(compile(source.replace(old, new), f"<{function.__name__}, planted>", "exec"), function.__globals__, made)
    return made[function.__name__]
