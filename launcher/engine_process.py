"""Run a module of the engine in a separate process. The launcher stays free of torch."""

import re
import signal
import sys
from importlib.util import find_spec
from pathlib import Path

from launcher.exit_codes import Failure

OURS = Path(__file__).parent.parent / "engine" / "__init__.py"
"""Path of the engine that ships with the launcher."""


def check_engine_is_ours(file: str | None = None) -> None:
    """Raise Failure if Python finds a foreign `engine`, for example a user's own engine.py on PYTHONPATH.

    `file`: the file that Python imports as `engine`. None: look the file up, without importing the engine.
    """
    if file is None:
        spec = find_spec("engine")
        file = spec.origin if spec is not None else None
    if file is not None and Path(file).resolve() != OURS.resolve():
        raise Failure(
            f"Python finds {file} in place of spotrl's own package `engine`; rename that file, or take its folder "
            "out of PYTHONPATH (a reward is found beside the job file without it)"
        )


def engine_command(module: str, *words: str) -> list[str]:
    """Return the command line of an engine module. Raises Failure if the engine is not installed on this machine."""
    from engine.installation import install_command  # only once `check_engine_is_ours` has found our own engine

    if find_spec("torch") is None:
        raise Failure(f"the engine is not installed here; `{install_command('engine')}`")
    return [sys.executable, "-P", "-m", module, *words]


def killed_words(returncode: int) -> str:
    """Return a sentence on the signal that ended an engine process; empty if the process ended by itself.

    `returncode`: as `subprocess` gives it, negative for a signal.
    """
    if returncode >= 0:
        return ""
    name = next((member.name for member in signal.Signals if member == -returncode), f"signal {-returncode}")
    more = "; Linux does that when memory is short: free some, or use a smaller model" if name == "SIGKILL" else ""
    return f"the engine was ended by {name}{more}"


def engine_failure(stderr: str, returncode: int) -> Failure:
    """Return the error that ended an engine process, without the name of the error class."""
    if killed := killed_words(returncode):
        return Failure(killed)
    last = (stderr.strip().splitlines() or ["the engine ended without a word"])[-1]
    return Failure(re.sub(r"^[\w.]*(Error|Exception): ", "", last))
