"""A wall clock that jumps: with this folder in PYTHONPATH, a process sees a time of day that is off by `CLOCK_JUMP`.

`CLOCK_JUMP` names a file that holds seconds. The monotonic and boot clocks continue unchanged, as on a real computer
whose clock is set.
"""

import os
import time

_time_ns, _file = time.time_ns, os.environ["CLOCK_JUMP"]


def _jumped_ns() -> int:
    with open(_file) as file:
        return _time_ns() + round(float(file.read() or 0)) * 1_000_000_000


time.time_ns = _jumped_ns
time.time = lambda: _jumped_ns() / 1e9
