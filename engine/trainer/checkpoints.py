"""The trainer's checkpoints. While the store is full or away the run waits: continuing would risk finished work."""

from collections.abc import Callable, Mapping
from typing import TypeVar

from engine.events import CheckpointSaved, StoreAway
from engine.protocol.draft import Draft
from engine.storage.checkpoint import Checkpoint, Start, checkpoint_name
from engine.storage.disk import AWAY, when_there_is_room
from engine.storage.tensor_files import Stored, TensorFile
from engine.trainer.context import TrainerContext
from engine.trainer.report import Reporter
from engine.trainer.state import TrainerState

Value = TypeVar("Value")


class Checkpoints:
    """Reads and writes the checkpoint store, and warns while the store has no room or does not answer."""

    def __init__(self, context: TrainerContext, state: TrainerState, reporter: Reporter) -> None:
        self._context = context
        self._state = state
        self._reporter = reporter

    def newest(self) -> Checkpoint | None:
        return self._patiently(lambda: self._context.store.newest())

    def newest_place(self) -> tuple[int, int] | None:
        """Return lineage and iteration of the newest checkpoint, or None."""
        return self._patiently(lambda: self._context.store.newest_place())

    def check_lineage(self) -> None:
        """Raise Superseded if the trainer of another node has claimed a newer lineage."""
        self._patiently(lambda: self._context.store.check_lineage(self._state.lineage))

    def start(self) -> Start:
        """Return the start weights named by the job."""
        return self._patiently(lambda: self._context.store.start())

    def claim_lineage(self) -> int:
        return self._patiently(lambda: self._context.store.claim_lineage())

    def put(self, path: str, data: bytes) -> None:
        self._patiently(lambda: self._context.store.put(path, data))

    def draft(self, batch: int) -> Draft | None:
        """Return the draft of a batch that this lineage made durable, or None."""
        return self._patiently(lambda: self._context.store.draft(self._state.lineage, batch))

    def put_draft(self, draft: Draft) -> None:
        """Make a draft durable."""
        self._patiently(lambda: self._context.store.put_draft(draft))

    def write_files(self, iteration: int, files: Mapping[str, TensorFile | Stored]) -> dict[str, str]:
        """Write the large files of the checkpoint after `iteration` batches. Returns their digests."""
        name = checkpoint_name(self._state.lineage, iteration)
        return self._patiently(lambda: self._context.store.write_files(name, files))

    def save(self, checkpoint: Checkpoint, digests: dict[str, str], *, keep: int) -> None:
        """Write the manifest, with which the checkpoint counts, and delete all but the `keep` newest.

        Raises Superseded if the trainer of another node has claimed a newer lineage.
        """
        digest = self._patiently(lambda: self._context.store.save(checkpoint, keep=keep, digests=digests))
        path = f"checkpoints/{checkpoint.name}"
        self._reporter.write(CheckpointSaved(iteration=checkpoint.iteration, path=path, digest=digest))

    def _patiently(self, access: Callable[[], Value]) -> Value:
        is_away = False

        def watched() -> Value:
            nonlocal is_away
            try:
                value = access()
            except OSError as error:
                if error.errno == AWAY and not is_away:
                    is_away = True
                    self._reporter.write(StoreAway(is_away=True))
                raise
            if is_away:
                self._reporter.write(StoreAway(is_away=False))
            return value

        def warn(text: str) -> None:
            self._reporter.warn(f"the checkpoint store {self._context.store.url}: {text}")

        return when_there_is_room(watched, warn)
