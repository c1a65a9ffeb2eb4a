"""The outcome of a SkyPilot request, read from its error and its log.

A launch that gave no instance is a refusal of its pool, in whatever words. The lists of words here choose the advice,
and tell three special cases from the rest: a launch to send again (the cloud did not answer), a lack of capacity
(evidence on the pool for later plans), and a denial (a quota or a permission, which only the user can change).
"""

import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from launcher.decide.node_facts import QUOTA_WORDS
from launcher.market.refusals import (
    EXPIRED_WORDS,
    KEYS_NOT_VALID,
    REFUSAL_WORDS,
    advice_on,
    cloud_in,
    is_login_needed,
    log_in_again,
    remedy_for,
)

log = logging.getLogger(__name__)

LOG_CHARACTERS = 4000
"""Characters kept from the end of a failed launch's log, as evidence of the failure."""


class Failed(StrEnum):
    """The reason of a failed launch."""

    NO_CAPACITY = "no_capacity"
    LOGIN = "login"
    """The user's login at the cloud has expired, so the launch is sent again until it is renewed."""
    REFUSED = "refused"
    """The cloud refused in other words, so another place is tried, and this one later."""
    DENIED = "denied"
    UNSENT = "unsent"
    """SkyPilot's client does not send the launch: it does not know the zone, the type or the image."""
    SETUP = "setup"
    CANCELLED = "cancelled"
    UNKNOWN = "unknown"
    """The cloud gave no answer about this launch, so the launch is sent again."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """The result of a request.

    Without `failed` the request succeeded. `text` is evidence: the cloud's error, the log's end.
    """

    failed: Failed | None = None
    text: str = ""


NO_CAPACITY_WORDS = (
    "InsufficientInstanceCapacity",
    "InsufficientHostCapacity",
    "InsufficientReservedInstanceCapacity",
    "InsufficientCapacityOnHost",
    "InsufficientFreeAddressesInSubnet",
    "SpotMaxPriceTooLow",
    "ZONE_RESOURCE_POOL_EXHAUSTED",
    "insufficientCapacity",
    "does not have enough resources available",
    "no more capacity in the zone",
    "STOCKOUT",
    "stockout",
    "UnfulfillableCapacity",
)

DENIED_WORDS = (
    *QUOTA_WORDS,
    *REFUSAL_WORDS,
    "Found no quota",
    "UnauthorizedOperation",
    "AccessDenied",
    "AuthFailure",
    "OptInRequired",
    "InvalidAMIID",
    "IAM_PERMISSION_DENIED",
    "PERMISSION_DENIED",
    "Required '",
    "is not found or access is unauthorized",
    "InvalidParameterValue",
    "UnsupportedOperation",
)

UNREACHABLE_WORDS = (
    # New identities become known everywhere with a delay.
    "Invalid IAM Instance Profile",
    "iam.gserviceaccount.com' was not found",
    "iam.gserviceaccount.com' does not exist",
    "RequestLimitExceeded",
    "Throttling",
    "EndpointConnectionError",
    "ConnectTimeoutError",
    "ReadTimeoutError",
    "ServiceUnavailable",
    "InternalError",
    "backendError",
    "rateLimitExceeded",
    "Connection refused",
    "ServerUnavailable",
    # What was made a moment ago is not known everywhere.
    "RESOURCE_NOT_READY",
    "resourceNotReady",
    "is not ready",
    "InvalidGroup.NotFound",
    "InvalidInstanceID.NotFound",
    "InvalidNetworkInterfaceID.NotFound",
    "ConcurrentModification",
    "EntityTemporarilyUnmodifiable",
    "NoSuchEntity",
)

CLOUD_ASKED = "ResourcesUnavailableError"
"""SkyPilot's error if the cloud was asked for an instance and gave none."""

LOGGED = re.compile(r"^[DIWE] \d\d-\d\d [\d:.]+ (?:PID=\d+ )?[\w.]+:\d+\] ")

RETRIED = re.compile(r"^.*\bCaught .*\. Retrying\.\s*$", re.MULTILINE)
"""A line of SkyPilot's log about a call that it then repeated. If the repetition fails too, its error follows."""

ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


def outcome_of(error: str, log: str) -> Outcome:
    """Return the meaning of a failed launch, from the cloud's own codes in SkyPilot's error and log.

    A lack of capacity in one zone outweighs a refusal in another: a request elsewhere, or later, may succeed. An
    account that heals, or that its user can mend while the run waits, is refused and never denied.
    """
    output = RETRIED.sub("", f"{error}\n{log}")
    if any(word in output for word in NO_CAPACITY_WORDS):
        return Outcome(failed=Failed.NO_CAPACITY, text=_sentence(output, NO_CAPACITY_WORDS))
    if is_login_needed(output):
        return Outcome(failed=Failed.LOGIN, text=login_text(_sentence(output, (*EXPIRED_WORDS, KEYS_NOT_VALID))))
    is_quota = any(word in output for word in QUOTA_WORDS)
    if not is_quota and (remedy := remedy_for(output)) is not None:
        return Outcome(failed=Failed.REFUSED, text=f"{_line_with(output, remedy.words)}\n{remedy.advice}")
    if any(word in output for word in UNREACHABLE_WORDS):
        return Outcome(failed=Failed.UNKNOWN, text=_sentence(output, UNREACHABLE_WORDS))
    if any(word in output for word in DENIED_WORDS):
        return Outcome(failed=Failed.DENIED, text=_where_to_ask(_sentence(output, DENIED_WORDS)))
    text = f"{error.strip()}\n{log.strip()}"[-LOG_CHARACTERS:]
    if error.startswith("CommandError"):
        return Outcome(failed=Failed.SETUP, text=text)
    # SkyPilot has asked the cloud, and the cloud's answer is final for this request.
    return Outcome(failed=Failed.REFUSED if error.startswith(CLOUD_ASKED) else Failed.UNKNOWN, text=text)


def login_text(error: str) -> str:
    """Return what a run says that waits for its user to log in."""
    return f"{error}; {log_in_again(cloud_in(error))}"


def _sentence(text: str, words: Sequence[str]) -> str:
    """Return the line with one of the words, without the log prefix."""
    return _line_with(text, re.compile("|".join(map(re.escape, words))))


def _line_with(text: str, words: re.Pattern[str]) -> str:
    lines = (LOGGED.sub("", line.strip()) for line in ANSI.sub("", text).splitlines())
    return next((line[-1000:] for line in lines if words.search(line)), "")


def _where_to_ask(reason: str) -> str:
    """Return the reason with advice for the user."""
    if advice := advice_on(reason):
        return f"{reason}\n{advice}"
    if any(word in reason for word in ("QUOTA", "quota", "LimitExceeded", "CountExceeded")):
        return (
            f"{reason}\nThe account's quota does not allow it. Ask for more: AWS, Service Quotas, Amazon EC2; "
            "Google Cloud, IAM & Admin, Quotas (CPUS, PREEMPTIBLE_NVIDIA_..._GPUS, GPUS_ALL_REGIONS)"
        )
    return f"{reason}\n`spotrl check --print-policy aws` (or gcp) prints the permissions that are needed"


def text_of(path: str | None) -> str:
    return Path(path).expanduser().read_text() if path and Path(path).expanduser().exists() else ""
