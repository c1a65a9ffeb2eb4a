"""A lease in the run's bucket: one controller per run across machines.

The ledger has a lease for the controllers of one ledger file (launcher/controller/lease.py). Another machine may launch
a run under the same name and into the same bucket, with a ledger of its own, or with a copy of this ledger. Both
controllers see the bucket. The holder of the object in the bucket continues. The second controller refuses to start, or
stops after it finds the lease lost. So nothing that lies in a ledger may identify the holder.

A bucket that does not answer takes the lease from no controller: the controller's nodes are billed and need a
controller.
`check` is called before every pass and in every transaction. Once `check` has raised LeaseLost, the controller may
neither buy nor terminate a node.
"""

import json
import logging
import os
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from hashlib import blake2b
from typing import Any

import obstore
from obstore.exceptions import AlreadyExistsError, BaseError, PreconditionError
from obstore.store import ObjectStore

from engine.clock import boot_ms
from launcher.exit_codes import Failure
from launcher.storage.stores import StoreError

log = logging.getLogger(__name__)

LEASE_OBJECT = "controller.json"

LEASE_SECONDS = 90.0
"""Time without renewal after which a holder is gone (wall clocks of two machines may differ by a few seconds)."""

RENEW_SECONDS = 20.0

DOUBT_SECONDS = 60.0
"""Time without renewal after which a holder may have been frozen during a takeover, and checks the bucket before
acting."""

TROUBLE = (BaseError, OSError, StoreError)
"""The errors of a bucket that does not answer, or cannot be opened."""


class LeaseHeld(Failure):
    """Another controller holds the lease of this run."""


class LeaseLost(Failure):
    """Another controller has taken over. This controller must not act any more."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Spent:
    """The money spent on a run by a moment of its clock, and the newest event in the ledger that said so.

    A ledger without the event is older: it was restored from a backup.
    """

    event: int
    at_ms: int
    micro_usd: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Claim:
    """The content of the lease object, and the object's version. `process`: pid on that host; 0: not known.

    `spent`: what the holder's ledger knew last. None: not known.
    """

    holder: str
    host: str
    process: int
    until_ms: int
    version: Any
    spent: Spent | None = None


class StoreLease:
    """The lease of one run. Taken by `take`, renewed by a background thread until `give_up`.

    `holder`: a name for one ledger file on one machine (`lease.this_ledger`). The successor of a dead controller of
    this file holds the same lease, and a controller of a copy does not.
    """

    def __init__(
        self,
        open_bucket: Callable[[], ObjectStore],
        run: str,
        holder: str,
        wall_ms: Callable[[], int] = lambda: time.time_ns() // 1_000_000,
        boot_ms: Callable[[], int] = boot_ms,
    ) -> None:
        self._open, self._run, self._wall_ms, self._boot_ms = open_bucket, run, wall_ms, boot_ms
        self._requested_ms = boot_ms()
        """Time of the last request to the bucket, answered or not (milliseconds since this machine was started)."""
        self._answered_ms: int | None = None
        """Time of the last request that the bucket answered. None: none yet."""
        self._opened: ObjectStore | None = None
        self._holder = blake2b(holder.encode(), digest_size=8).hexdigest()
        self._version: Any = None
        self._ended = threading.Event()
        self._renewing = threading.Lock()
        self.lost: str | None = None
        """Host of the new holder after a takeover. Once set, the controller must not act any more."""
        self.spent: Spent | None = None
        """Written with each renewal: set by the controller, and before that as `take` found it in the bucket."""

    @property
    def answers(self) -> bool:
        """Return whether the bucket has answered this process within the last two renewals."""
        return self._answered_ms is not None and self._boot_ms() - self._answered_ms <= 2 * RENEW_SECONDS * 1000

    def take(self) -> None:
        """Become the holder, if the bucket answers. Raises LeaseHeld with the name of the holding machine."""
        try:
            self._take()
        except TROUBLE as error:
            log.warning("nobody knows whether another machine controls %s: %s", self._run, _first_line(error))

    def check_free(self) -> None:
        """Take nothing. Raise LeaseHeld if another machine controls the run, StoreError if the bucket is silent."""
        try:
            claim = self._read()
        except TROUBLE as error:
            raise StoreError(
                f"nobody knows whether another machine controls {self._run}: {_first_line(error)}; try again when the "
                "bucket answers"
            ) from None
        self._refuse_held(claim)

    def _take(self) -> None:
        claim = self._read()
        self._refuse_held(claim)
        self.spent = None if claim is None else claim.spent
        try:
            self._write(claim)
        except (AlreadyExistsError, PreconditionError):
            raise LeaseHeld(
                f"another machine has just taken {self._run}, in the same bucket; use that one, or another --name"
            ) from None

    def _refuse_held(self, claim: Claim | None) -> None:
        if claim is not None and claim.holder != self._holder and claim.until_ms > self._wall_ms():
            seconds = (claim.until_ms - self._wall_ms()) // 1000
            process = f", process {claim.process}" if claim.process else ""
            raise LeaseHeld(
                f"{self._run} is controlled from another machine ({claim.host}) or by another copy of its ledger"
                f"{process}, whose lease in the bucket lasts another {seconds} s; use `spotrl` there. To go on here, "
                "end that process and wait until its lease has run out; for another run choose another --name"
            )

    def keep(self) -> None:
        """Renew the lease in a background thread from now on."""
        threading.Thread(target=self._renew_for_ever, name="store lease", daemon=True).start()

    def check(self) -> None:
        """Raise LeaseLost if another machine controls the run now.

        A process that was frozen or asleep renews first: its renewal thread may not have run yet.
        """
        if self.lost is None and self._boot_ms() - self._requested_ms >= DOUBT_SECONDS * 1000:
            self.renew()
        if self.lost is not None:
            raise LeaseLost(
                f"{self._run} is controlled from another machine now ({self.lost}); this controller neither buys nor "
                "ends anything any more"
            )

    def renew(self) -> None:
        """Renew the lease once. Sets `lost` if another holder has the lease."""
        with self._renewing:
            self._renew()
            self._requested_ms = self._boot_ms()

    def _renew(self) -> None:
        try:
            claim = self._read()
            if claim is not None and claim.holder not in ("", self._holder):
                self.lost = claim.host
                return
            self._write(claim)
            self._answered_ms = self._boot_ms()
        except (AlreadyExistsError, PreconditionError):
            self.lost = "another machine"
        except TROUBLE as error:
            self._opened = None  # opened anew with the user's present keys: the old ones may have expired
            log.warning("the lease in the bucket could not be renewed: %s", _first_line(error))

    def give_up(self) -> None:
        """Give the lease back at the end of the run, so that the next controller can start at once.

        The object stays with what was spent, for a run that is resumed with an older ledger.
        """
        self._ended.set()
        try:
            with self._renewing:
                claim = self._read()
                if claim is not None and claim.holder == self._holder:
                    self._write(claim, until_ms=0)
        except TROUBLE as error:
            log.warning("the lease in the bucket stays until it runs out: %s", _first_line(error))

    def _renew_for_ever(self) -> None:
        while self.lost is None and not self._ended.wait(RENEW_SECONDS):
            self.renew()

    @property
    def _store(self) -> ObjectStore:
        if self._opened is None:
            self._opened = self._open()
        return self._opened

    def _read(self) -> Claim | None:
        try:
            answer = obstore.get(self._store, LEASE_OBJECT)
        except FileNotFoundError:
            return None
        meta = answer.meta
        version = {name: meta[name] for name in ("e_tag", "version") if meta.get(name)}
        try:
            raw = json.loads(bytes(answer.bytes()))
            holder, host, until_ms = str(raw["holder"]), str(raw["host"]), int(raw["until_ms"])
            process = int(raw.get("process", 0))
            raw_spent = raw.get("spent")
            spent = (
                None if raw_spent is None else Spent(**{name: int(value) for name, value in dict(raw_spent).items()})
            )
        except (ValueError, KeyError, TypeError):
            log.warning("%s of %s is not a lease: it is written anew", LEASE_OBJECT, self._run)
            return Claim(holder="", host="nobody", process=0, until_ms=0, version=version)
        # The bucket's own time bounds leases written by a clock hours ahead.
        until_ms = min(until_ms, round((meta["last_modified"].timestamp() + LEASE_SECONDS) * 1000))
        return Claim(holder=holder, host=host, process=process, until_ms=until_ms, version=version, spent=spent)

    def _write(self, over: Claim | None, until_ms: int | None = None) -> None:
        """Write the lease only if the object is unchanged since the read. `until_ms`: None for a whole lease.

        Of two concurrent writers, the second fails.
        """
        if until_ms is None:
            until_ms = self._wall_ms() + round(LEASE_SECONDS * 1000)
        claim = {
            "holder": self._holder,
            "host": socket.gethostname(),
            "process": os.getpid(),
            "until_ms": until_ms,
            "spent": None if self.spent is None else asdict(self.spent),
        }
        mode: Any = "create" if over is None else over.version
        obstore.put(self._store, LEASE_OBJECT, json.dumps(claim).encode(), mode=mode)


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)
