"""Faults by place and duration. A test adds them beforehand, and the fakes look them up at each call.

`where` is a path: "" is everywhere, then "aws", "aws/us-east-1", "aws/us-east-1/us-east-1a". A fault applies below its
path, until `until` (monotonic seconds), for this many `times`, or until it is cleared. With `every`, one call of so
many meets it on average; the calls are drawn with a fixed seed.
"""

import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class Kind(StrEnum):
    CAPACITY = "capacity"
    """No capacity. `code` names another refusal: quota, price too low, too many spot instances."""
    DOWN = "down"
    """The cloud's API (not its storage) answers 503."""
    UNREACHABLE = "unreachable"
    """The cloud's API closes the connection without an answer."""
    THROTTLED = "throttled"
    LOST_REPLY = "lost_reply"
    """An instance is created, and the connection is closed without an answer."""
    STALLED = "stalled"
    """AWS begins to create an instance only when this fault is over."""
    STORE_DOWN = "store_down"
    """The object store answers 503."""
    DENIED = "denied"
    """A missing permission, named by `code`: `ec2:RunInstances` or `compute.instances.create`."""
    FORBIDDEN = "forbidden"
    """An organisation's policy. On AWS a service control policy denies every call to EC2 of the region but for the list
    of regions, on Google Cloud a constraint on locations refuses new instances there."""
    EXPIRED = "expired"
    """The user's login has expired or was revoked, also for the object store. Identities of instances still work."""
    ENDS_FAIL = "ends_fail"
    """An order to end an instance fails with an internal error, and the instance runs on."""
    UNANNOUNCED = "unannounced"
    """A preemption that a client orders ends the instance at once, without a notice."""
    UNFULFILLED = "unfulfilled"
    """A preemption that a client orders is reported as done, and the instance runs on."""
    NO_NOTICE = "no_notice"
    """Google Cloud's API does not know the field for a longer notice before a preemption."""
    NO_BOOT = "no_boot"
    """The instance is created and never comes up."""


@dataclass(kw_only=True, slots=True)
class Fault:
    kind: Kind
    where: str = ""
    market: str = ""
    """spot or on_demand; empty is both."""
    run: str = ""
    """Only calls about instances with this run's label; empty is all calls."""
    code: str = ""
    until: float | None = None
    times: int | None = None
    every: int = 1
    met: int = 0
    """Number of calls that met this fault."""


@dataclass
class Faults:
    faults: list[Fault] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)
    dice: random.Random = field(default_factory=lambda: random.Random(0))

    def add(
        self,
        kind: str,
        where: str = "",
        *,
        market: str = "",
        run: str = "",
        code: str = "",
        seconds: float | None = None,
        times: int | None = None,
        every: int = 1,
    ) -> None:
        until = None if seconds is None else time.monotonic() + seconds
        with self.lock:
            self.faults.append(
                Fault(
                    kind=Kind(kind),
                    where=where.strip("/"),
                    market=market,
                    run=run,
                    code=code,
                    until=until,
                    times=times,
                    every=every,
                )
            )

    def clear(self, kind: str = "", where: str = "", run: str = "") -> None:
        """Clear the faults of a kind under `where`, and of a run; all faults without arguments."""
        with self.lock:
            self.faults = [
                f
                for f in self.faults
                if not (kind in ("", f.kind) and _under(f.where, where.strip("/")) and run in ("", f.run))
            ]

    def met(self, kind: Kind, where: str, market: str = "", code: str | None = None, run: str = "") -> Fault | None:
        """Return the fault that a call at `where` meets, and count it. `code`: only faults with this or no code.

        `run`: the run whose instance the call is about; empty if it is about none.
        """
        now = time.monotonic()
        with self.lock:
            self.faults = [f for f in self.faults if f.until is None or f.until > now]
            for fault in self.faults:
                fits = fault.market in ("", market) and fault.run in ("", run)
                fits = fits and (code is None or fault.code in ("", code))
                if fault.kind is kind and _under(where, fault.where) and fits and self.dice.randrange(fault.every) == 0:
                    if fault.times is not None:
                        if fault.times <= 0:
                            continue
                        fault.times -= 1
                    fault.met += 1
                    return fault
        return None

    def told(self) -> list[dict[str, Any]]:
        with self.lock:
            return [
                {
                    "kind": f.kind,
                    "where": f.where,
                    "market": f.market,
                    "run": f.run,
                    "code": f.code,
                    "times": f.times,
                    "met": f.met,
                }
                for f in self.faults
            ]


def later(seconds: float, act: Callable[[], None]) -> None:
    """Call now, or after this many seconds in a thread."""
    if seconds <= 0:
        act()
    else:
        timer = threading.Timer(seconds, act)
        timer.daemon = True
        timer.start()


def _under(place: str, path: str) -> bool:
    return not path or place == path or place.startswith(path + "/")
