"""End a process although threads of its scorer never return. Python would wait for them at the exit."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from engine.pool.server import EXIT_SCORER_HANGS
from engine.worker.scoring_call import ScorerHangs
from engine.worker.worker import Worker


@contextmanager
def ends_despite_scorers() -> Iterator[list[Worker]]:
    """Yield the list of workers of this process, to be filled. End the process at once if calls of theirs are stuck.

    The exit code is EXIT_SCORER_HANGS after ScorerHangs, and otherwise what it would be without the stuck calls.
    """
    workers: list[Worker] = []
    try:
        yield workers
    except ScorerHangs as error:
        print(error, flush=True)
        _leave(EXIT_SCORER_HANGS)
    except SystemExit as error:
        if _is_stuck(workers):
            _leave(error.code if isinstance(error.code, int) else 1)
        raise
    except BaseException as error:
        if _is_stuck(workers):
            sys.excepthook(type(error), error, error.__traceback__)
            _leave(1)
        raise
    if _is_stuck(workers):
        _leave(0)


def _is_stuck(workers: list[Worker]) -> bool:
    return any(worker.stuck_calls for worker in workers)


def _leave(code: int) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
