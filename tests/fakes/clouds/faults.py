"""What goes wrong, where, for how long. Asked for beforehand by a test; looked up by the fakes at each call.

`where` is a path: "" is everywhere, then "aws", "aws/us-east-1", "aws/us-east-1/us-east-1a". A fault holds for what
lies under its path, until `until` (monotonic seconds), or for so many `times`, or until it is cleared.
"""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class Kind(StrEnum):
    CAPACITY = "capacity"
    """No machine to be had. `code` says another refusal: quota, price too low, too many spot instances."""
    DOWN = "down"
    """The cloud's API (not its storage) answers 503."""
    UNREACHABLE = "unreachable"
    """The cloud's API closes the connection without an answer."""
    THROTTLED = "throttled"
    LOST_REPLY = "lost_reply"
    """A machine is created, and the connection closed instead of an answer."""
    STALLED = "stalled"
    """AWS begins with the creation of a machine only when this is over."""
    STORE_DOWN = "store_down"
    """The object store answers 503."""
    DENIED = "denied"
    """A permission that is missing: `code` names it, `ec2:RunInstances` or `compute.instances.create`."""
    NO_BOOT = "no_boot"
    """The machine is created and never comes up."""


@dataclass(kw_only=True, slots=True)
class Fault:
    kind: Kind
    where: str = ""
    market: str = ""
    """spot or on_demand; empty is both."""
    code: str = ""
    until: float | None = None
    times: int | None = None
    met: int = 0
    """How often it was met."""


@dataclass
class Faults:
    faults: list[Fault] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def add(
        self,
        kind: str,
        where: str = "",
        *,
        market: str = "",
        code: str = "",
        seconds: float | None = None,
        times: int | None = None,
    ) -> None:
        until = None if seconds is None else time.monotonic() + seconds
        with self.lock:
            self.faults.append(
                Fault(kind=Kind(kind), where=where.strip("/"), market=market, code=code, until=until, times=times)
            )

    def clear(self, kind: str = "", where: str = "") -> None:
        """Those of a kind that lie under `where`; all of them without arguments."""
        with self.lock:
            self.faults = [f for f in self.faults if not (kind in ("", f.kind) and _under(f.where, where.strip("/")))]

    def met(self, kind: Kind, where: str, market: str = "", code: str | None = None) -> Fault | None:
        """The fault that a call at `where` runs into, counted as met. `code`: only one that names it, or names none."""
        now = time.monotonic()
        with self.lock:
            self.faults = [f for f in self.faults if f.until is None or f.until > now]
            for fault in self.faults:
                fits = fault.market in ("", market) and (code is None or fault.code in ("", code))
                if fault.kind is kind and _under(where, fault.where) and fits:
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
                {"kind": f.kind, "where": f.where, "market": f.market, "code": f.code, "times": f.times, "met": f.met}
                for f in self.faults
            ]


def later(seconds: float, act: Callable[[], None]) -> None:
    """Now, or after so many seconds in a thread of its own."""
    if seconds <= 0:
        act()
    else:
        timer = threading.Timer(seconds, act)
        timer.daemon = True
        timer.start()


def _under(place: str, path: str) -> bool:
    return not path or place == path or place.startswith(path + "/")
