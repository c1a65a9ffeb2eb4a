"""Load a `Reward` by its name in the job file.

Built-in scorers are chosen by name. A name with a colon is the user's own `package.module:function`, imported
from the job's workdir: `function(images, prompts)` returns a float or a `Score` per image. Every call checks the
returned values, because a wrong reward silently trains the wrong goal. A non-finite reward becomes NaN: the engine then
skips the group and reports the skip.
"""

import difflib
import importlib
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from math import isfinite, nan
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from torch import Tensor

from engine.config import EngineConfig, RewardConfig
from engine.protocol.request import Score
from engine.rewards.frames import FrameMeans
from engine.rewards.reward import Reward

BUILT_IN = ("ocr", "ocr_strict", "ocr_smooth", "shapes", "shapes_strict")


class RewardError(ValueError):
    """The job's reward cannot be used. The message gives the reason."""


def load_reward(config: RewardConfig, workdir: str | None) -> Reward:
    """Return the job's scorer. `workdir`: the folder of a user's own module."""
    reward = _reward_of_name(config, workdir)
    return reward if config.frames is None else FrameMeans(reward, config.frames)


def _reward_of_name(config: RewardConfig, workdir: str | None) -> Reward:
    match config.name:
        case "ocr" | "ocr_strict" | "ocr_smooth":
            from engine.rewards.ocr import OcrReward

            return OcrReward(config.name)
        case "shapes" | "shapes_strict":
            from engine.rewards.shapes import ShapesReward

            return ShapesReward(config.name)
        case name if ":" in name:
            return UserReward(name, _import_function(name, workdir))
        case name:
            near = difflib.get_close_matches(name, BUILT_IN, n=1, cutoff=0.0)[0]
            raise RewardError(
                f"reward.name is {name!r}, which is no reward of ours; did you mean {near!r}? "
                f"There are {', '.join(BUILT_IN)}, and `package.module:function` for your own"
            )


def load_student(config: EngineConfig) -> Reward | None:
    """Return the student, a small model that ranks candidate seeds instead of the reward. None: no student exists."""
    reads_digits = config.model.name == "digits-ocr" and config.prompts == "digits"
    if config.reward.name not in ("ocr", "ocr_strict", "ocr_smooth") or not reads_digits:
        return None
    from engine.rewards.student import load_digits_student

    return load_digits_student()


class UserReward:
    """A user's function, with checked and converted results."""

    def __init__(self, name: str, function: Callable[[Tensor, Sequence[str]], Any]) -> None:
        self._name = name
        self._function = function

    def __call__(self, images: Tensor, prompts: Sequence[str]) -> list[Score]:
        try:
            returned = self._function(images, list(prompts))
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


def _described(value: Any) -> str:
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) <= 60 else text[:57] + '...'}"


def _import_function(name: str, workdir: str | None) -> Callable[[Tensor, Sequence[str]], Any]:
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
    checked: Callable[[Tensor, Sequence[str]], Any] = function
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
