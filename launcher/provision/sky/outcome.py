"""The outcome of a SkyPilot request, read from its error and its log."""

import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from launcher.decide.node_facts import QUOTA_WORDS
from launcher.market.refusals import REFUSAL_WORDS, advice_on

log = logging.getLogger(__name__)

LOG_CHARACTERS = 4000
"""Characters kept from the end of a failed launch's log, as evidence of the failure."""


class Failed(StrEnum):
    """The reason of a failed launch."""

    NO_CAPACITY = "no_capacity"
    DENIED = "denied"
    SETUP = "setup"
    CANCELLED = "cancelled"
    UNKNOWN = "unknown"


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
    "RESOURCE_NOT_READY",
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
)

LOGGED = re.compile(r"^[DIWE] \d\d-\d\d [\d:.]+ (?:PID=\d+ )?[\w.]+:\d+\] ")

ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


def outcome_of(error: str, log: str) -> Outcome:
    """Return the meaning of a failed launch, from the cloud's own codes in SkyPilot's error and log.

    A lack of capacity in one zone outweighs a refusal in another: a request elsewhere, or later, may succeed.
    """
    output = f"{error}\n{log}"
    if any(word in output for word in NO_CAPACITY_WORDS):
        return Outcome(failed=Failed.NO_CAPACITY, text=_sentence(output, NO_CAPACITY_WORDS))
    if any(word in output for word in UNREACHABLE_WORDS):
        return Outcome(failed=Failed.UNKNOWN, text=_sentence(output, UNREACHABLE_WORDS))
    if any(word in output for word in DENIED_WORDS):
        return Outcome(failed=Failed.DENIED, text=_where_to_ask(_sentence(output, DENIED_WORDS)))
    if error.startswith("CommandError"):
        return Outcome(failed=Failed.SETUP, text=f"{error.strip()}\n{log.strip()}"[-LOG_CHARACTERS:])
    return Outcome(failed=Failed.UNKNOWN, text=f"{error.strip()}\n{log.strip()}"[-LOG_CHARACTERS:])


def _sentence(text: str, words: Sequence[str]) -> str:
    """Return the line with one of the words, without the log prefix."""
    lines = (LOGGED.sub("", line.strip()) for line in ANSI.sub("", text).splitlines())
    return next((line[-1000:] for line in lines if any(word in line for word in words)), "")


def _where_to_ask(reason: str) -> str:
    """Return the reason with advice for the user."""
    if any(word in reason for word in ("QUOTA", "quota", "LimitExceeded", "CountExceeded")):
        return (
            f"{reason}\nThe account's quota does not allow it. Ask for more: AWS, Service Quotas, Amazon EC2; "
            "Google Cloud, IAM & Admin, Quotas (CPUS, PREEMPTIBLE_NVIDIA_..._GPUS, GPUS_ALL_REGIONS)"
        )
    if advice := advice_on(reason):
        return f"{reason}\n{advice}"
    return f"{reason}\n`spotrl check --print-policy aws` (or gcp) prints the permissions that are needed"


def text_of(path: str | None) -> str:
    return Path(path).expanduser().read_text() if path and Path(path).expanduser().exists() else ""
