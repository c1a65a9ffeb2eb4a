"""A user's own reward: `package.module:function`, imported from the job's workdir.

    function(images, prompts)            images: float tensor [B, C, H, W] in [-1, 1]; prompts: B strings
    function(images, prompts, metadata)  metadata: B mappings from the job's prompt file, empty for text files

The function returns a float or a `Score` per image, or is `async` and returns the same. Every call checks the returned
values, because a wrong reward silently trains the wrong goal. A non-finite reward becomes NaN: the engine then skips
the group and reports the skip.
"""

import asyncio
import difflib
import importlib
import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from math import isfinite, nan
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from torch import Tensor

from engine.prompt_set import Metadata
from engine.protocol.request import Score
from engine.rewards.reward import RewardError


class UserReward:
    """A user's function, with checked and converted results."""

    def __init__(self, name: str, function: Callable[..., Any]) -> None:
        self._name = name
        self._function = function
        self._takes_metadata = _has_parameter(function, "metadata")

    def score(self, images: Tensor, prompts: Sequence[str], metadata: Sequence[Metadata]) -> list[Score]:
        """Score images [B, C, H, W]. Raises RewardError for a wrong return value."""
        more = {"metadata": list(metadata)} if self._takes_metadata else {}
        try:
            returned = self._function(images, list(prompts), **more)
            if inspect.iscoroutine(returned):
                returned = asyncio.run(returned)
        except SystemExit as error:  # an exit would end the scoring process
            raise RewardError(f"reward {self._name} called sys.exit({error.code!r}); raise an error instead") from error
        values = self._as_list(returned)
        if len(values) != len(prompts):
            raise RewardError(
                f"reward {self._name} returned {len(values)} values for {len(prompts)} images; return one each"
            )
        return [self._score(index, value) for index, value in enumerate(values)]

    def _as_list(self, returned: Any) -> list[Any]:
        if isinstance(returned, Tensor | np.ndarray):
            if returned.ndim != 1:
                raise RewardError(
                    f"reward {self._name} returned an array of shape {list(returned.shape)}; "
                    "return one value per image, shape [B]"
                )
            return list(returned.tolist())
        if isinstance(returned, Sequence) and not isinstance(returned, str | bytes):
            return list(returned)
        raise RewardError(
            f"reward {self._name} returned {_described(returned)}; return a list with one float or Score per image"
        )

    def _score(self, index: int, value: Any) -> Score:
        if isinstance(value, Score):
            return value if isfinite(value.reward) else Score(reward=nan, metrics=value.metrics)
        if isinstance(value, Tensor) and value.numel() == 1:
            value = value.item()
        if isinstance(value, bool | int | float | np.number | np.bool_):
            number = float(value)
            return Score(reward=number if isfinite(number) else nan, metrics={})
        raise RewardError(
            f"reward {self._name} returned {_described(value)} for image {index}; return a float or a Score"
        )


def _has_parameter(function: Callable[..., Any], name: str) -> bool:
    try:
        return name in inspect.signature(function).parameters
    except (TypeError, ValueError):  # a function written in C may have no signature
        return False


def _described(value: Any) -> str:
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) <= 60 else text[:57] + '...'}"


def import_function(name: str, workdir: str | None) -> Callable[..., Any]:
    """Return the function `package.module:function`, with the module looked up in `workdir`. Raises RewardError."""
    module_name, _, function_name = name.partition(":")
    folder = Path(workdir or ".").resolve()
    with _importable(folder):
        try:
            module = importlib.import_module(module_name)
        except ModuleNotFoundError as error:
            missing = error.name or ""
            _check_it_is_the_users(name, sys.modules.get(module_name.partition(".")[0]), folder)
            if module_name == missing or module_name.startswith(f"{missing}."):
                raise RewardError(
                    f"reward.name is {name!r}, but there is no module {missing!r} in {folder} or among the installed "
                    "packages; put it into the job's workdir"
                ) from error
            raise RewardError(
                f"reward.name is {name!r}; its module {module_name!r} needs {missing!r}, which is not installed"
            ) from error
        except (Exception, SystemExit) as error:
            raise RewardError(f"reward.name is {name!r}; importing {module_name!r} failed: {error!r}") from error
    _check_it_is_the_users(name, module, folder)
    function = getattr(module, function_name, None)
    if not callable(function):
        public = sorted(key for key, value in vars(module).items() if callable(value) and not key.startswith("_"))
        near = difflib.get_close_matches(function_name, public, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"it has {', '.join(public) or 'none'}"
        raise RewardError(f"reward.name is {name!r}, but {module_name!r} has no function {function_name!r}; {hint}")
    checked: Callable[..., Any] = function
    return checked


def _check_it_is_the_users(name: str, module: ModuleType | None, folder: Path) -> None:
    """Raise RewardError if an installed module has the name of the user's module."""
    first = name.partition(":")[0].partition(".")[0]
    theirs = next((path for path in (folder / f"{first}.py", folder / first) if path.exists()), None)
    file = getattr(module, "__file__", None)
    if theirs is not None and file is not None and not Path(file).resolve().is_relative_to(folder):
        raise RewardError(f"reward.name is {name!r}, but {file} has the name of {theirs}; rename {theirs.name}")


@contextmanager
def _importable(folder: Path) -> Iterator[None]:
    """Put the folder last on the import path, for the import alone.

    Last, because a user's `torch.py` or `engine.py` would otherwise replace the real module.
    """
    before = list(sys.path)
    sys.path.append(str(folder))
    importlib.invalidate_caches()
    try:
        yield
    finally:
        sys.path[:] = before
