"""Send a message to a webhook that accepts Slack's format: a POST of `{"text": "..."}`."""

from urllib.parse import urlsplit

import httpx

TIMEOUT_SECONDS = 10.0


class NotDelivered(Exception):
    """The webhook did not accept the message. `is_final`: a second attempt would fail too.

    The text holds no URL, because the URL of a webhook is its password.
    """

    def __init__(self, text: str, *, is_final: bool) -> None:
        """Take the cause in words."""
        super().__init__(text)
        self.is_final = is_final


def url_problem(url: str) -> str:
    """Return what is wrong with a webhook's URL, without the URL, or "" for a usable one."""
    try:
        parts = urlsplit(url)
        host = parts.hostname or ""
    except ValueError:
        return "is no URL"
    if parts.scheme == "https" and host:
        return ""
    if parts.scheme == "http" and host in ("127.0.0.1", "localhost", "::1"):
        return ""
    return "does not hold an https:// URL"


def send(url: str, text: str, timeout_s: float = TIMEOUT_SECONDS) -> None:
    """Post the message. Redirects are not followed. Raises NotDelivered."""
    try:
        answer = httpx.post(url, json={"text": text}, timeout=timeout_s, follow_redirects=False)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise NotDelivered(type(error).__name__, is_final=False) from None
    if not answer.is_success:
        is_final = answer.status_code < 500 and answer.status_code not in (408, 429)
        raise NotDelivered(f"HTTP status {answer.status_code}", is_final=is_final)
