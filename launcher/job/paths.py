"""Paths in a job: of files and folders on this machine.

A path in a job file is relative to the folder of that file. A path in a flag, in a `SPOTRL_*` variable or in the user's
config is relative to the working folder, or to the config's folder. Loading a job turns all of them into paths relative
to the job file's folder if they are inside it, else into whole paths, so that every later reader has one rule.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from launcher.job.hub import hub_id
from launcher.job.schema import PROMPTS


def paths_seen_from(workdir: Path, values: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Return a layer of a job's values, with paths relative to `folder` written relative to `workdir`.

    A path outside of `workdir` becomes a whole path. `model.path` stays as it is if it may be a model of the hub and is
    no folder here.
    """

    def seen(path: Any) -> Any:
        if not isinstance(path, str) or not path.strip():
            return path
        whole = folder / Path(path).expanduser()
        try:
            return str(whole.resolve().relative_to(workdir.resolve()))
        except ValueError:
            return str(whole.absolute())

    def changed(part: Any, fields: Mapping[str, Callable[[Any], Any]]) -> Any:
        if not isinstance(part, Mapping):
            return part
        return {key: fields[key](value) if key in fields else value for key, value in part.items()}

    def scorer(part: Any) -> Any:
        return changed(part, {name: lambda model: changed(model, {"path": seen}) for name in ("model", "colours")})

    def reward(part: Any) -> Any:
        parts = {"parts": lambda parts: [scorer(part) for part in parts] if isinstance(parts, list) else parts}
        return changed(scorer(part), parts)

    def model_path(path: Any) -> Any:
        is_of_hub = isinstance(path, str) and hub_id(path) is not None and not (folder / path).exists()
        return path if is_of_hub else seen(path)

    def start(source: Any) -> Any:
        return seen(source) if isinstance(source, str) and "/" in source else source

    def prompts(source: Any) -> Any:
        return source if source in PROMPTS else seen(source)

    model = {"path": model_path, "from": start, "start": start, "lora": seen}
    sections = {"model": lambda part: changed(part, model), "prompts": prompts, "test_prompts": seen, "reward": reward}
    return dict(changed(values, sections))
