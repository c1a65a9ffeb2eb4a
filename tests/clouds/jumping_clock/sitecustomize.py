"""A wall clock that somebody sets: with this folder in PYTHONPATH, a process sees the time of day `CLOCK_JUMP` off.

`CLOCK_JUMP` names a file that holds seconds. What counts since the machine's start (monotonic, boot time) goes on as
it does on a real machine whose clock is set.
"""

import os
import time

_time_ns, _file = time.time_ns, os.environ["CLOCK_JUMP"]


def _jumped_ns() -> int:
    with open(_file) as file:
        return _time_ns() + round(float(file.read() or 0)) * 1_000_000_000


time.time_ns = _jumped_ns
time.time = lambda: _jumped_ns() / 1e9
