"""The cloud's word that a spot machine goes, heard on the machine itself.

the metadata service says so -> `notice.json` {"deadline_ms", "source"} in the node's folder -> the agent drains

AWS names the moment (two minutes ahead); Google says only that it happens, and gives 30 s. The earliest deadline that
anyone wrote wins. AWS's rebalance recommendation and Google's maintenance event are hints: written down in
`hint.json`, and nothing drains for them. A service that does not answer is asked again, and hurts nobody.
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
from engine.runtime.child import read_note, write_note
from engine.runtime.metadata import GceMetadata, Imds

ASK_SECONDS = 1.0
"""AWS advises 5 s; a second asked sooner is a second more to drain in."""
LONGEST_GAP_SECONDS = 10.0
"""Between two questions to a service that does not answer."""
WAIT_SECONDS = 60
"""How long Google's service may keep a question open."""

GCE_NOTICE_MS = 30_000
"""What Google gives from the preemption signal to the end (its page on spot VMs); a "best effort"."""

INSTANCE_ACTION = "meta-data/spot/instance-action"
REBALANCE = "meta-data/events/recommendations/rebalance"
PREEMPTED = "instance/preempted"
MAINTENANCE = "instance/maintenance-event"


def watch_notice(cloud: Literal["aws", "gcp"], folder: Path, clock: Clock) -> None:
    """Listen from now on, in threads of its own."""
    if cloud == "aws":
        imds = Imds()
        watches = [lambda: _ask_aws(imds, folder, clock)]
    else:
        watches = [_Gce(PREEMPTED, folder, clock).ask, _Gce(MAINTENANCE, folder, clock).ask]
    for ask in watches:
        threading.Thread(target=_keep_asking, args=(ask,), daemon=True).start()


def write_notice(folder: Path, deadline_ms: int, source: str) -> None:
    """An earlier deadline stays."""
    known = read_note(folder / "notice.json").get("deadline_ms")
    if known is None or deadline_ms < int(known):
        write_note(folder / "notice.json", deadline_ms=deadline_ms, source=source)


def write_hint(folder: Path, source: str, clock: Clock) -> None:
    if read_note(folder / "hint.json").get("source") != source:
        write_note(folder / "hint.json", at_ms=clock.now_ms(), source=source)


def _ask_aws(imds: Imds, folder: Path, clock: Clock) -> None:
    action = imds.get(INSTANCE_ACTION)
    if action is not None:
        said = json.loads(action)
        deadline = datetime.fromisoformat(said["time"].replace("Z", "+00:00"))
        write_notice(folder, round(deadline.timestamp() * 1000), f"aws spot/instance-action: {said['action']}")
    rebalance = imds.get(REBALANCE)
    if rebalance is not None:
        write_hint(folder, f"aws rebalance recommendation: {rebalance}", clock)
    time.sleep(ASK_SECONDS)


class _Gce:
    """One value that is waited for, whole or changed."""

    def __init__(self, path: str, folder: Path, clock: Clock) -> None:
        self._path, self._folder, self._clock = path, folder, clock
        self._metadata, self._etag = GceMetadata(), ""

    def ask(self) -> None:
        text, etag = self._metadata.watch(self._path, self._etag, WAIT_SECONDS)
        if self._path == PREEMPTED and text == "TRUE":
            write_notice(self._folder, self._clock.now_ms() + GCE_NOTICE_MS, "gcp instance/preempted")
        if self._path == MAINTENANCE and text != "NONE":
            write_hint(self._folder, f"gcp {MAINTENANCE}: {text}", self._clock)
        if not etag or etag == self._etag:
            time.sleep(ASK_SECONDS)  # a service that cannot wait is asked at the pace of the other one
        self._etag = etag


def _keep_asking(ask: Callable[[], Any]) -> None:
    gap = ASK_SECONDS
    trouble = ""
    while True:
        try:
            ask()
            gap, trouble = ASK_SECONDS, ""
        except (OSError, ValueError, KeyError, TypeError) as error:
            # Also a full disk under notice.json: the next question brings the same answer.
            if not trouble:
                with contextlib.suppress(OSError):
                    print(f"the metadata service: {error!r}; asking on", flush=True)
            trouble = repr(error)
            time.sleep(gap)
            gap = min(LONGEST_GAP_SECONDS, 2 * gap)
