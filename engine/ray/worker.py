"""Run a worker as a Ray actor: the same `Worker` class, on the spot node chosen by the supervisor.

The actor reports its state to its node by a file, `worker-N.json`, because the node's agent does not use Ray.
"""

import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from engine.node.child import died_too_often, note_start, open_log, read_note, write_note
from engine.node.ray_environment import NODE_VARIABLE
from engine.node_spec import NodeSpec
from engine.ray.cluster import die_with_raylet
from engine.ray.coordinator import RayTransport, RayWeights
from engine.worker.transport import CoordinatorLost

PATIENCE_SECONDS = 60.0
"""Wall seconds a worker keeps calling a coordinator that does not answer."""


class WorkerActor:
    """Ray actor of a worker.

    The actor dies with its raylet. The supervisor makes another actor while the node lives.
    """

    def __init__(self, number: int) -> None:
        die_with_raylet()
        spec = NodeSpec.model_validate_json(os.environ[NODE_VARIABLE])
        open_log(spec, f"worker-{number}")
        self._mark = mark_file(spec, number)
        self._starts = note_start(self._mark, spec, state="starting")
        # Import torch only here, because supervisor and coordinator import this module too.
        from engine.node.build_worker import make_worker

        transport = RayTransport(spec.own_token, patience_seconds=PATIENCE_SECONDS)
        noticed = _exists(Path(spec.folder) / "notice.json")
        self._worker = make_worker(spec, number, transport, RayWeights(transport), noticed)
        self._serving = threading.Lock()
        self._reason: str | None = None
        self._report("ready")

    def boot(self) -> int:
        """Return the start number of this process, used to report its death."""
        return self._worker.boot

    def serve(self) -> str:
        """Work until ordered to exit; returns the reason. Concurrent callers all get the same answer."""
        import torch

        from engine.pool.server import EXIT_SCORER_HANGS
        from engine.worker.scoring_call import ScorerHangs

        with self._serving:
            if self._reason is None:
                torch.set_num_threads(1)  # torch counts threads per calling thread
                try:
                    reason = self._worker.serve()
                except ScorerHangs as error:
                    print(error, flush=True)
                    os._exit(EXIT_SCORER_HANGS)
                except CoordinatorLost:
                    self._starts = self._starts[:-1]  # the coordinator's loss is not a death of the worker
                    write_note(self._mark, starts=self._starts, progress=read_note(self._mark).get("progress"))
                    raise
                print("exit:", reason, flush=True)
                self._report("exit")
                self._reason = reason
        return self._reason

    def _report(self, state: str) -> None:
        if read_note(self._mark).get("starts", [])[-1:] == self._starts[-1:]:  # else another process has taken the slot
            write_note(self._mark, starts=self._starts, progress=read_note(self._mark).get("progress"), state=state)


def mark_file(spec: NodeSpec, number: int) -> Path:
    return Path(spec.folder) / f"worker-{number}.json"


def forget_marks(spec: NodeSpec) -> None:
    """Forget the states of an earlier raylet's workers, before a raylet starts. The counts of starts stay."""
    for number in range(spec.workers):
        mark = mark_file(spec, number)
        if mark.exists():
            note = read_note(mark)
            write_note(mark, starts=note.get("starts", []), progress=note.get("progress"))


def states(spec: NodeSpec) -> Sequence[str]:
    """Return each worker's state: starting, ready, exit, broken (too many deaths), or "" (not started yet)."""
    marks = [mark_file(spec, number) for number in range(spec.workers)]
    return ["broken" if died_too_often(mark) else read_note(mark).get("state", "") for mark in marks]


def _exists(path: Path) -> Callable[[], bool]:
    """Return a function that is True once this file has existed."""
    existed = False

    def look() -> bool:
        nonlocal existed
        existed = existed or path.exists()
        return existed

    return look
