"""Watch for the cloud's preemption notice on the instance itself.

metadata service reports a preemption -> `notice.json` {"deadline_ms", "source"} in the node's folder -> agent drains

AWS gives the time of the preemption (two minutes ahead). Google only reports the event, and gives 30 s, or what the
launcher asked for and Google granted (`notice_ms`). The earliest deadline written by any source wins. AWS's rebalance
recommendation and Google's maintenance event are hints: hints are recorded in `hint.json`, and never cause a drain. If
the service does not answer, the watcher asks again; the failure is harmless.
"""

import contextlib
import json
import threading
import time
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

from engine.clock import Clock
from engine.node.child import read_note, write_note
from engine.storage.metadata import GceMetadata, Imds

ASK_SECONDS = 1.0
"""Interval of requests. AWS advises 5 s; each second saved is another second to drain."""
LONGEST_GAP_SECONDS = 10.0
"""Maximum seconds between two requests to a service that does not answer."""
WAIT_SECONDS = 60
"""Maximum seconds for which Google's service may keep a request open."""

GCE_NOTICE_MS = 30_000
"""Milliseconds Google gives from the preemption signal to the end (Google's page on spot VMs); a "best effort". A VM
with `scheduling.preemptionNoticeDuration` has that time before the signal."""

INSTANCE_ACTION = "meta-data/spot/instance-action"
REBALANCE = "meta-data/events/recommendations/rebalance"
PREEMPTED = "instance/preempted"
MAINTENANCE = "instance/maintenance-event"


def watch_notice(cloud: Literal["aws", "gcp"], folder: Path, clock: Clock, notice_ms: int | None = None) -> None:
    """Start to watch, in daemon threads. `notice_ms`: what Google granted this VM; None: `GCE_NOTICE_MS`."""
    if cloud == "aws":
        imds = Imds()
        watches = [lambda: _ask_aws(imds, folder, clock)]
    else:
        granted_ms = GCE_NOTICE_MS if notice_ms is None else notice_ms
        watches = [_Gce(path, folder, clock, granted_ms).ask for path in (PREEMPTED, MAINTENANCE)]
    for ask in watches:
        threading.Thread(target=_keep_asking, args=(ask,), daemon=True).start()


def write_notice(folder: Path, deadline_ms: int, source: str) -> None:
    """Write the notice, unless the existing notice has an earlier deadline."""
    written_ms = read_note(folder / "notice.json").get("deadline_ms")
    if written_ms is None or deadline_ms < int(written_ms):
        write_note(folder / "notice.json", deadline_ms=deadline_ms, source=source)


def write_hint(folder: Path, source: str, clock: Clock) -> None:
    if read_note(folder / "hint.json").get("source") != source:
        write_note(folder / "hint.json", at_ms=clock.now_ms(), source=source)


def _ask_aws(imds: Imds, folder: Path, clock: Clock) -> None:
    action = imds.get(INSTANCE_ACTION)
    if action is not None:
        announced = json.loads(action)
        deadline = datetime.fromisoformat(announced["time"].replace("Z", "+00:00"))
        write_notice(folder, round(deadline.timestamp() * 1000), f"aws spot/instance-action: {announced['action']}")
    rebalance = imds.get(REBALANCE)
    if rebalance is not None:
        write_hint(folder, f"aws rebalance recommendation: {rebalance}", clock)
    time.sleep(ASK_SECONDS)


class _Gce:
    """Watcher of one metadata value, by long polling."""

    def __init__(self, path: str, folder: Path, clock: Clock, notice_ms: int) -> None:
        self._path, self._folder, self._clock, self._notice_ms = path, folder, clock, notice_ms
        self._metadata, self._etag = GceMetadata(), ""

    def ask(self) -> None:
        text, etag = self._metadata.watch(self._path, self._etag, WAIT_SECONDS)
        if self._path == PREEMPTED and text == "TRUE":
            write_notice(self._folder, self._clock.now_ms() + self._notice_ms, "gcp instance/preempted")
        if self._path == MAINTENANCE and text != "NONE":
            write_hint(self._folder, f"gcp {MAINTENANCE}: {text}", self._clock)
        if not etag or etag == self._etag:
            time.sleep(ASK_SECONDS)  # a service without long polling is asked at AWS's interval
        self._etag = etag


def _keep_asking(ask: Callable[[], Any]) -> None:
    gap = ASK_SECONDS
    trouble = ""
    while True:
        try:
            ask()
            gap, trouble = ASK_SECONDS, ""
        except (OSError, ValueError, KeyError, TypeError) as error:
            # The error may also be a full disk under notice.json: the next request brings the same answer.
            if not trouble:
                with contextlib.suppress(OSError):
                    print(f"the metadata service: {error!r}; asking on", flush=True)
            trouble = repr(error)
            time.sleep(gap)
            gap = min(LONGEST_GAP_SECONDS, 2 * gap)
