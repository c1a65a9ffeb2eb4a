"""A reward that is a function of a notebook or program, as a module that every node can import.

Nodes import a reward by its name, `module:function`, from the job's folder. So a function that is not in a module there
is written to one: its source, and what the source uses. Modules are imported again and constants are written out. The
module is named after its text, so a run that is resumed finds the function that it began with, whatever the notebook
has by then.
"""

import ast
import dis
import hashlib
import importlib
import inspect
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

from launcher.exit_codes import Failure

HEADER = '"""A reward, written by spotrl from a function. Runs import this file."""\n'


def with_names_of_functions(reward: Any, folder: Path) -> Any:
    """Return a reward of a job with each function in it replaced by `module:function`, importable from `folder`."""
    if isinstance(reward, Mapping):
        return {key: with_names_of_functions(value, folder) for key, value in reward.items()}
    if isinstance(reward, list | tuple):
        return [with_names_of_functions(value, folder) for value in reward]
    return importable_name(reward, folder) if callable(reward) else reward


def importable_name(function: Callable[..., Any], folder: Path) -> str:
    """Return `module:function` for a function, and write the module into `folder` unless the function is in one there.

    Raises Failure for a function that cannot be written: without a name or a source, or with values that have no text.
    """
    if not isinstance(function, FunctionType) or not function.__name__.isidentifier():
        raise Failure(f"the reward is {function!r}; use a function that `def` defines, with images and prompts")
    file = getattr(sys.modules.get(function.__module__ or ""), "__file__", None)
    place = folder.joinpath(*(function.__module__ or "").split("."))
    is_of_module = function.__qualname__ == function.__name__
    if file is not None and is_of_module and Path(file) in (place.with_suffix(".py"), place / "__init__.py"):
        return f"{function.__module__}:{function.__name__}"
    text = HEADER + "\n" + module_text(function)
    name = f"reward_{hashlib.blake2b(text.encode(), digest_size=4).hexdigest()}"
    (folder / f"{name}.py").write_text(text, encoding="utf-8")
    return f"{name}:{function.__name__}"


def module_text(function: FunctionType) -> str:
    """Return the text of a module with the function and all that it uses. Raises Failure as `importable_name`."""
    values: dict[str, Any] = {}
    imports: list[str] = []
    constants: list[str] = []
    sources: list[str] = []

    def add(name: str, value: Any) -> None:
        if name in values:
            if values[name] is not value:
                raise Failure(f"the reward {function.__name__} uses two values called {name}; rename one of them")
            return
        values[name] = value
        is_own = isinstance(value, FunctionType) and value.__name__.isidentifier()
        if is_own and value.__module__ == function.__module__:
            source = _source(value)
            for used, its_value in _used(value, source):
                add(used, its_value)
            sources.append(source if name == value.__name__ else f"{source}\n{name} = {value.__name__}\n")
        elif isinstance(value, ModuleType):
            imports.append(f"import {value.__name__} as {name}" if value.__name__ != name else f"import {name}")
        elif (origin := _origin(value)) is not None:
            imports.append(f"from {origin[0]} import {origin[1]}" + f" as {name}" * (origin[1] != name))
        elif _is_literal(value):
            constants.append(f"{name} = {value!r}")
        else:
            raise Failure(
                f"the reward {function.__name__} uses {name}, of type {type(value).__name__}, which cannot be written "
                f"to a file; make {name} inside of the function, or put both into a module beside the job"
            )

    add(function.__name__, function)
    head = "\n".join([*sorted(imports), *constants])
    return "\n\n".join(part for part in (head, *sources) if part)


def _source(function: FunctionType) -> str:
    try:
        return textwrap.dedent(inspect.getsource(function)).rstrip() + "\n"
    except (OSError, TypeError):
        raise Failure(
            f"the reward uses {function.__name__}, whose source is nowhere; put it into a module beside the job"
        ) from None


def _used(function: FunctionType, source: str) -> Iterator[tuple[str, Any]]:
    """Yield the names outside of the function that its body and its signature use, with their values."""
    known = function.__globals__ | {
        name: cell.cell_contents
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    }
    names = {*function.__code__.co_freevars, *_global_names(function.__code__)}
    definition = ast.parse(source).body[0]
    if isinstance(definition, ast.FunctionDef | ast.AsyncFunctionDef):
        for part in (*definition.decorator_list, definition.args, *filter(None, [definition.returns])):
            names |= {node.id for node in ast.walk(part) if isinstance(node, ast.Name)}
    yield from ((name, known[name]) for name in sorted(names) if name in known)


def _global_names(code: CodeType) -> Iterator[str]:
    """Yield the global names of a body, and of the functions and comprehensions in the body."""
    yield from (step.argval for step in dis.get_instructions(code) if step.opname in ("LOAD_GLOBAL", "LOAD_NAME"))
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _global_names(constant)


def _origin(value: Any) -> tuple[str, str] | None:
    """Return the module and the name from which the value can be imported, or None."""
    module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
    if not isinstance(module, str) or not isinstance(name, str) or module in ("__main__", "builtins"):
        return None
    try:
        is_there = getattr(importlib.import_module(module), name, None) is value
    except ImportError:
        return None
    return (module, name) if is_there else None


def _is_literal(value: Any) -> bool:
    try:
        return bool(ast.literal_eval(repr(value)) == value)
    except (ValueError, SyntaxError, TypeError):
        return False
