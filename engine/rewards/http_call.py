"""Ask a server for scores, with a key, a deadline, and repeated tries with growing pauses.

An answer is one of three:

    good       the caller's `read` returns a value
    try again  no connection, no whole answer in time, status 408, 425, 429 or 5xx, or `BadAnswer` from `read`
    refused    any other status: the request will never be accepted; raises RewardError at once

After the last try `NoAnswer` is raised with the last fault. No message contains the key, even if the server repeats the
key in its answer.
"""

import os
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import TypeVar

import httpx
import stamina

from engine.reward_config import LONGEST_PAUSE_SECONDS
from engine.rewards.reward import RewardError

Answer = TypeVar("Answer")

Around = Callable[[Callable[[], bytes]], bytes]
"""Takes the function that sends a request once, and returns its answer. Raises what that function raises."""

TRY_AGAIN = (408, 425, 429)
"""Status codes below 500 after which the same request may succeed."""

GAVE_UP = (502, 504, 520, 524)
"""Status codes of a gateway that got no whole answer from the server behind it. The server may have worked on the
request. 520 and 524 are Cloudflare's."""

FIRST_PAUSE, LONGEST_PAUSE = 0.5, LONGEST_PAUSE_SECONDS
"""Seconds between two tries. A pause is twice the pause before, with up to a second of jitter."""

LARGEST_ANSWER = 16 << 20
"""Bytes of an answer. A larger answer is no list of scores."""

SHOWN = 300
"""Characters of a server's answer in a message."""


class BadAnswer(Exception):
    """An answer from which no scores can be taken. The request is repeated."""


class Unanswered(BadAnswer):
    """No whole answer to a request that the server may have received, and may have worked on."""


class NoAnswer(Exception):
    """No good answer after all tries. The message gives the last fault."""


class HttpCall:
    """POST requests to one address. Threads may share a call."""

    def __init__(
        self, url: str, *, key_name: str | None, timeout_seconds: float, tries: int, connections: int = 4
    ) -> None:
        self._url, self._timeout_seconds, self._tries = url, timeout_seconds, tries
        self._key = _key(key_name)
        self._client = httpx.Client(
            headers={} if self._key is None else {"Authorization": f"Bearer {self._key}"},
            timeout=httpx.Timeout(timeout_seconds, connect=min(10.0, timeout_seconds)),
            limits=httpx.Limits(max_connections=connections),
        )

    def post(
        self,
        body: bytes,
        headers: Mapping[str, str],
        read: Callable[[bytes], Answer],
        around: Around = lambda send: send(),
    ) -> Answer:
        """Send a request until `read` accepts the answer. `read` raises BadAnswer for a bad answer.

        `around`: wraps every single try, to count or to delay them. Raises NoAnswer after the last try, and RewardError
        if the server refuses the request.
        """
        try:
            for attempt in stamina.retry_context(
                on=BadAnswer,
                attempts=self._tries,
                timeout=None,
                wait_initial=FIRST_PAUSE,
                wait_max=LONGEST_PAUSE,
            ):
                with attempt:
                    answer = read(around(lambda: self._one(body, headers)))
        except BadAnswer as error:
            times = "1 try" if self._tries == 1 else f"{self._tries} tries"
            raise NoAnswer(f"{self._url}: {times}, the last with {self._without_key(str(error))}") from None
        return answer

    def get(self) -> bytes:
        """Get the address once. Raises NoAnswer for a fault that may pass, RewardError for a refusal."""
        try:
            return self._one(b"", {}, method="GET")
        except BadAnswer as error:
            raise NoAnswer(f"{self._url}: 1 try, with {self._without_key(str(error))}") from None

    def _one(self, body: bytes, headers: Mapping[str, str], method: str = "POST") -> bytes:
        """Send a request once. Raises BadAnswer for a fault that may pass, RewardError for a refusal."""
        deadline = time.monotonic() + self._timeout_seconds
        content = bytearray()
        try:
            with self._client.stream(method, self._url, content=body, headers=dict(headers)) as response:
                for chunk in response.iter_bytes():
                    content += chunk
                    if time.monotonic() > deadline:
                        raise Unanswered(f"no whole answer in {self._timeout_seconds:g} s")
                    if len(content) > LARGEST_ANSWER:
                        raise Unanswered(f"an answer of more than {LARGEST_ANSWER >> 20} MiB")
        except (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout) as error:
            raise BadAnswer(f"{type(error).__name__}: {error}") from None
        except httpx.TimeoutException:
            raise Unanswered(f"no whole answer in {self._timeout_seconds:g} s") from None
        except httpx.HTTPError as error:
            raise Unanswered(f"{type(error).__name__}: {error}") from None
        if response.is_success:
            return bytes(content)
        fault = f"HTTP {response.status_code} and {shown(bytes(content))}"
        if response.status_code in TRY_AGAIN or response.status_code >= 500:
            _wait_as_told(response)
            raise Unanswered(fault) if response.status_code in GAVE_UP else BadAnswer(fault)
        raise RewardError(
            f"the scorer {self._url} refused a request with {self._without_key(fault)}; check url, protocol and key"
        )

    def _without_key(self, text: str) -> str:
        return text if self._key is None else text.replace(self._key, "***")


def shown(content: bytes) -> str:
    """Return the beginning of an answer as text for a message."""
    text = content[:SHOWN].decode("utf-8", errors="replace").strip()
    return repr(text) if text else "an empty answer"


def _key(name: str | None) -> str | None:
    """Return the key in an environment variable. Raises RewardError if the variable has no usable value."""
    if name is None:
        return None
    value = os.environ.get(name, "").strip()
    if not value:
        raise RewardError(
            f"the reward needs a key in {name}, which is not set; list it in secrets, and export {name}=..."
        )
    if not value.isascii() or not value.isprintable():
        raise RewardError(f"the key in {name} has characters that a header cannot hold; export it again")
    return value


def _wait_as_told(response: httpx.Response) -> None:
    """Wait for the seconds of a Retry-After header, at most `LONGEST_PAUSE`. A date in the header is ignored."""
    with suppress(ValueError):
        time.sleep(min(max(0.0, float(response.headers.get("Retry-After", "0"))), LONGEST_PAUSE))
