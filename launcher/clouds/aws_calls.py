"""Clients of AWS's services, their time limits, and their errors."""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from threading import Lock
from typing import Any

from launcher.clouds.base import CloudRefused, CloudUnreachable, LoginNeeded, NotSettled
from launcher.market.refusals import EXPIRED_CODES, advice_on, are_keys_refused, log_in_again

Clients = Callable[[str, str], Any]
"""(service, region) -> the client."""

TRANSIENT = re.compile(r"Throttl|RequestLimitExceeded|SlowDown|Unavailable|Internal|RequestTimeout")
"""Error codes to retry."""

SETTLING = re.compile(
    r"\.NotFound$|^NoSuchEntity$|^ConcurrentModification|^EntityTemporarilyUnmodifiable$|^OperationAborted$|"
    r"^IdempotentParameterMismatch$|^(?:Incorrect|InvalidGroup\.InUse|DependencyViolation)"
)
"""Error codes that heal within seconds: AWS tells a part of its servers later than others what was made or changed."""

MISSING = re.compile(r"\.NotFound$|^NoSuchEntity$|\.Malformed$")

NO_LOGIN = (
    "NoCredentialsError",
    "PartialCredentialsError",
    "CredentialRetrievalError",
    "TokenRetrievalError",
    "ProfileNotFound",
    "SSOError",
    "LoginError",
    "NoAuthTokenError",
    "TokenLoadError",
)
"""botocore's errors, by name, for a login that has expired or is missing. Not every version has all of them."""

ALREADY = frozenset({"InvalidPermission.Duplicate", "InvalidGroup.Duplicate", "EntityAlreadyExists"})


def clients() -> Clients:
    lock = Lock()
    cached: dict[tuple[str, str], Any] = {}
    sessions: list[Any] = []

    def client(service: str, region: str) -> Any:
        import boto3
        from botocore.config import Config

        with lock:
            if not sessions:
                sessions.append(boto3.session.Session())
            if (service, region) not in cached:
                session = sessions[0]
                # Two attempts of at most 4.5 s and a pause between them, so no call takes longer than 10 s. Callers
                # retry.
                patience = Config(
                    retries={"mode": "standard", "total_max_attempts": 2}, connect_timeout=1.5, read_timeout=3
                )
                new_client = session.client(service, region_name=region, config=patience)
                new_client.meta.events.register("after-call", partial(forget_expired, session))
                if session.get_credentials() is None:  # the next call looks for a login again
                    sessions.clear()
                    return new_client
                cached[service, region] = new_client
            return cached[service, region]

    def forget_expired(session: Any, parsed: Any, **_: Any) -> None:
        """Drop a session whose keys AWS no longer accepts. The next call reads the user's files anew."""
        if isinstance(parsed, dict) and parsed.get("Error", {}).get("Code") in (*EXPIRED_CODES, "AuthFailure"):
            with lock:
                if sessions and sessions[0] is session:
                    sessions.clear()
                    cached.clear()

    return client


def known_regions() -> list[str]:
    """Return the commercial regions that botocore knows, without a call."""
    import boto3

    return sorted(boto3.session.Session().get_available_regions("ec2"))


def code_of(error: Exception) -> str:
    return str(getattr(error, "response", {}).get("Error", {}).get("Code", ""))


@contextmanager
def missing_is_fine() -> Iterator[None]:
    """Ignore errors about missing resources, which need no removal."""
    try:
        yield
    except Exception as error:
        if not MISSING.search(code_of(error)) and code_of(error) != "InvalidPermission.NotFound":
            raise


@contextmanager
def existing_is_fine() -> Iterator[None]:
    try:
        yield
    except Exception as error:
        if code_of(error) not in ALREADY:
            raise


@contextmanager
def errors_named(operation: str, policy: str = "--print-policy aws") -> Iterator[None]:
    """Convert the client's errors to CloudUnreachable (unknown state) or CloudRefused.

    `policy`: options of `spotrl check` that print the permissions of this call.
    """
    from botocore import exceptions as aws

    try:
        yield
    except aws.ClientError as error:
        code, message = code_of(error), error.response.get("Error", {}).get("Message", "")
        status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
        if code in EXPIRED_CODES or are_keys_refused(f"{operation}: {message}"):
            raise LoginNeeded(
                f"{operation}: AWS no longer accepts this login ({code}: {message}); {log_in_again('aws')}"
            ) from None
        if SETTLING.search(code):
            raise NotSettled(f"{operation}: AWS does not know it yet ({code}: {message}); it is asked again") from None
        if TRANSIENT.search(code) or status >= 500 or status == 429:
            raise CloudUnreachable(
                f"{operation}: AWS answers {code or status} ({message}); it is asked again"
            ) from None
        advice = advice_on(message) or f"`spotrl check {policy}` prints what is needed"
        raise CloudRefused(f"{operation}: AWS refused ({code}: {message}); {advice}") from None
    except aws.BotoCoreError as error:
        if any(kind.__name__ in NO_LOGIN for kind in type(error).__mro__):
            raise LoginNeeded(f"{operation}: AWS found no valid login ({error}); {log_in_again('aws')}") from None
        raise CloudUnreachable(f"{operation}: AWS did not answer ({error}); it is asked again") from None
