"""Read a cloud's metadata service on an instance: its identity, its rights, its preemption.

`Imds` reads AWS's service (IMDSv2: a token first), `GceMetadata` Google's. `SPOTRL_IMDS_URL` and `GCE_METADATA_HOST`
name another server. No request uses a proxy, and every call has a time limit. Failures are OSError or ValueError.
Standard library only: the guard of the spend deadline uses this module too.
"""

import http.client
import os
import urllib.error
import urllib.request
from urllib.parse import urlencode

IMDS_URL = "SPOTRL_IMDS_URL"
GCE_HOST = "GCE_METADATA_HOST"

TOKEN_SECONDS = 21_600
"""Lifetime of a token of AWS's service, in seconds; the longest AWS allows."""

ANSWER_SECONDS = 2.0


class Imds:
    """Client of AWS's instance metadata, version 2."""

    def __init__(self) -> None:
        self._url = os.environ.get(IMDS_URL, "http://169.254.169.254").rstrip("/")
        self._token = ""

    def get(self, path: str) -> str | None:
        """Return the text at `path`, e.g. meta-data/instance-id, or None if the path has no value (404)."""
        for attempt in range(2):
            if not self._token:
                headers = {"X-aws-ec2-metadata-token-ttl-seconds": str(TOKEN_SECONDS)}
                self._token = answer("PUT", f"{self._url}/latest/api/token", headers, ANSWER_SECONDS)[0]
            try:
                return answer(
                    "GET", f"{self._url}/latest/{path}", {"X-aws-ec2-metadata-token": self._token}, ANSWER_SECONDS
                )[0]
            except urllib.error.HTTPError as error:
                if error.code == 404:
                    return None
                if error.code != 401 or attempt:
                    raise
                self._token = ""  # the token has expired
        return None


class GceMetadata:
    """Client of Google's instance metadata."""

    def __init__(self) -> None:
        self._url = f"http://{os.environ.get(GCE_HOST, 'metadata.google.internal')}/computeMetadata/v1"

    def get(self, path: str) -> str:
        """Return the text at `path`, e.g. instance/name."""
        return self._ask(path, {}, ANSWER_SECONDS)[0]

    def watch(self, path: str, etag: str, wait_seconds: int) -> tuple[str, str]:
        """Return the text at `path` and its etag, once the etag differs from `etag`, or after `wait_seconds`.

        Returns at once without an etag.
        """
        if not etag:
            return self._ask(path, {}, ANSWER_SECONDS)
        query = {"wait_for_change": "true", "last_etag": etag, "timeout_sec": str(wait_seconds)}
        return self._ask(path, query, wait_seconds + ANSWER_SECONDS)

    def _ask(self, path: str, query: dict[str, str], seconds: float) -> tuple[str, str]:
        url = f"{self._url}/{path}" + (f"?{urlencode(query)}" if query else "")
        return answer("GET", url, {"Metadata-Flavor": "Google"}, seconds)


_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def answer(method: str, url: str, headers: dict[str, str], seconds: float) -> tuple[str, str]:
    """Return text and etag. Raises OSError (including HTTPError) or ValueError."""
    try:
        with _DIRECT.open(urllib.request.Request(url, headers=headers, method=method), timeout=seconds) as response:
            return response.read().decode(), response.headers.get("ETag", "")
    except http.client.HTTPException as error:
        raise OSError(f"{url}: {error!r}") from error
