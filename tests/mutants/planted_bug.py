"""A bug that tests plant: its name, what it forgets, and the code that puts it in place and takes it out again."""

from collections.abc import Iterator
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
