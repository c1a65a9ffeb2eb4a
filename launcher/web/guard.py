"""Refuse every request that does not come from the user's own browser tab.

The server listens on loopback only. Any program and any web page of the user's browser can still reach loopback, so:

- `Host` must be a name of loopback. A page that points its own name at 127.0.0.1 (DNS rebinding) keeps its name here.
- `Origin`, where a browser sends it, must be this server. A request that changes something must have it.
- Every path with data needs the token that only the printed URL has.
"""

import re
import secrets
from collections.abc import Mapping

LOOPBACK = re.compile(r"(127\.0\.0\.1|localhost|\[::1\])(:[0-9]{1,5})?", re.ASCII)
"""A name of loopback, with a port or without. Nothing may follow: `127.0.0.1:80@evil.com` is another host."""

HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
        "base-uri 'none'; form-action 'self'; frame-ancestors 'none'"
    ),
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",  # the URL carries the token
    "X-Content-Type-Options": "nosniff",
}
"""Headers of every answer."""


FROZEN = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'"
"""Content policy of a page that is also written as one file: its style is in the page, and it has no script."""


def is_token(request_token: str, token: str) -> bool:
    """Return whether a request has the token, in a time that does not depend on `request_token`."""
    return secrets.compare_digest(request_token.encode(), token.encode())


def refusal(method: str, headers: Mapping[str, str], request_token: str, token: str, needs_token: bool) -> str | None:
    """Return why a request is refused, or None. `request_token`: the token of the request, empty if it has none."""
    host = headers.get("host", "")
    if not LOOPBACK.fullmatch(host):
        return f"this server answers on loopback only, and the request names the host {host[:80]!r}"
    origin = headers.get("origin")
    if origin is not None and origin != f"http://{host}":
        return "the request comes from another site"
    if method not in ("GET", "HEAD") and origin is None:
        return "a request that changes something must name its origin"
    if needs_token and not is_token(request_token, token):
        return "the token is missing or wrong; open the address that `spotrl ui` printed"
    return None
