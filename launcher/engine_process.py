"""A module of the engine in a process of its own, so that the launcher stays free of torch."""

import re
import sys
from importlib.util import find_spec

from launcher.exit_codes import Failure


def engine_command(module: str, *words: str) -> list[str]:
    """Return the command line. Raises Failure when the engine is not installed here."""
    if find_spec("torch") is None:
        raise Failure("the engine is not installed here; `pip install 'spotrl[engine]'`")
    return [sys.executable, "-P", "-m", module, *words]


def engine_failure(stderr: str) -> Failure:
    """Return the error that ended such a process, in its own words and without the name of its class."""
    last = (stderr.strip().splitlines() or ["the engine ended without a word"])[-1]
    return Failure(re.sub(r"^[\w.]*(Error|Exception): ", "", last))
