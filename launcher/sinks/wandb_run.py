"""A run in W&B, through its own client.

Online, W&B continues the run by its id and says how many records it holds. Offline there is nobody to ask: each start
writes a new file from the first record on, and removes the older files once the new one has them all. So `wandb sync`
finds one folder with the whole run.
"""

import os
import shlex
import shutil
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from launcher.sinks.messages import ENDS, Open, Opened, Record
from launcher.sinks.sink import NotAccepted


class WandbRun:
    """One run of W&B. The record's number is W&B's own step; charts use `iteration`."""

    def __init__(self) -> None:
        """Load the client. Raises ImportError."""
        import wandb  # an extra, and slow to load

        self._wandb: Any = wandb
        self._run: Any = None
        self._older: list[Path] = []

    def open(self, message: Open) -> Opened:
        settings, folder = message.settings, Path(message.folder)
        folder.mkdir(parents=True, exist_ok=True)
        key = os.environ.get(settings["key"], "")
        mode = settings.get("mode") or ("online" if key else "offline")
        if mode == "online" and not key:
            raise NotAccepted(f"{settings['key']} is not set where the controller was started", is_final=True)
        if mode == "offline":
            self._older = sorted((folder / "wandb").glob("offline-run-*"))
        quiet = self._wandb.Settings(
            silent=True,
            console="off",
            disable_git=True,
            save_code=False,
            disable_job_creation=True,
            x_disable_stats=True,
            x_disable_meta=True,
            **({"api_key": key} if mode == "online" else {}),
        )
        self._run = self._wandb.init(
            project=settings["project"],
            entity=settings.get("entity"),
            id=message.run_id,
            name=message.name,
            resume="allow" if mode == "online" else None,
            mode=mode,
            dir=str(folder),
            config={"job": message.job, **message.facts},
            settings=quiet,
        )
        self._run.define_metric("iteration")
        self._run.define_metric("*", step_metric="iteration")
        if mode == "online":
            return Opened(held=int(self._run.step), where=self._run.url or "")
        written = Path(self._run.dir).parent
        return Opened(held=0, where=str(written), offline=why_offline(settings, written))

    def add(self, records: tuple[Record, ...], total: int) -> None:
        for record in records:
            row: dict[str, Any] = {"iteration": record.iteration, **record.values}
            if record.sheet is not None and find_spec("PIL") is not None:
                row["images"] = self._wandb.Image(record.sheet)
            self._run.log(row, step=record.number)
        if self._older and records[-1].number + 1 >= total:
            for folder in self._older:
                shutil.rmtree(folder, ignore_errors=True)
            self._older = []

    def close(self, state: ENDS) -> None:
        self._run.summary["state"] = state
        self._run.finish(exit_code=1 if state == "failed" else 0)


def why_offline(settings: Mapping[str, Any], written: Path) -> str:
    """Return why a run is offline, and what sends the files in the folder `written`, in words."""
    sends = f"`wandb sync {shlex.quote(str(written))}` sends the files"
    if settings.get("mode") == "offline":
        return f"logging.wandb.mode is offline; {sends}"
    return f"{settings['key']} is not set here; export it and repeat the command, or {sends}"
