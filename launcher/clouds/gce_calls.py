"""Calls to Google Cloud's REST services: credentials, retries, pages, operations and errors.

Plain REST with google-auth, because the calls are few, and a poll every other second should not need a client library.
`SPOTRL_GCP_COMPUTE_ENDPOINT`, `SPOTRL_GCP_IAM_ENDPOINT` and `SPOTRL_GCP_RESOURCE_MANAGER_ENDPOINT` name another server,
which receives no credentials.
"""

import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from threading import Lock, local
from typing import Any

from launcher.clouds.base import OWNER_LABEL, RUN_LABEL, CloudRefused, CloudUnreachable, LoginNeeded, NotSettled
from launcher.clouds.gce_services import COMPUTE, Answer
from launcher.market.refusals import advice_on, log_in_again

PROJECT = "GOOGLE_CLOUD_PROJECT"

CALL_SECONDS = (1.5, 3.0)
"""Seconds to connect and to answer. A call is tried twice and takes at most 10 s."""

TOKEN_SECONDS = 4.0

WAIT_SECONDS = 8.0
"""Longest wait of one call for an operation. A longer operation is found finished by a later call."""

POLL_SECONDS = 0.3
"""Time between two reads of an operation's status."""

TRANSIENT = frozenset({408, 429, 500, 502, 503, 504})
"""HTTP codes after which a call is repeated."""


SETTLING = frozenset({"resourceNotReady", "RESOURCE_NOT_READY", "resourceInUseByAnotherResource", "ABORTED"})
"""Reasons of answers that heal within seconds, as does a 404 for what was made a moment ago."""


class GoogleCalls:
    """Calls on behalf of one project.

    Raises Answer for an HTTP error, and the client library's errors, which `errors_named` converts.

    Thread-safe.
    """

    def __init__(self, environ: Mapping[str, str] = os.environ) -> None:
        self._environ = environ
        self._lock = Lock()
        self._kept = local()
        self._known: tuple[Any, str] | None = None

    @property
    def project(self) -> str:
        return self.credentials()[1]

    @property
    def compute_url(self) -> str:
        """Address of Compute Engine, or of the server that stands in for it."""
        return self._environ.get(COMPUTE[0], "") or COMPUTE[1]

    @property
    def is_elsewhere(self) -> bool:
        """True if another server stands in for Google Cloud."""
        return bool(self._environ.get(COMPUTE[0]))

    def labelled(self, collection: str, owner: str | None, run: str | None) -> Iterator[dict[str, Any]]:
        terms = [f"labels.{RUN_LABEL}:*" if run is None else f"labels.{RUN_LABEL}={run}"]
        if owner is not None:
            terms.append(f"labels.{OWNER_LABEL}={owner}")
        text = terms[0] if len(terms) == 1 else " ".join(f"({term})" for term in terms)
        return (entry for entry in self.everywhere(collection, filter=text) if RUN_LABEL in entry.get("labels", {}))

    def everywhere(self, collection: str, filter: str = "") -> Iterator[dict[str, Any]]:
        for page in self.pages(COMPUTE, f"/aggregated/{collection}", {"filter": filter} if filter else {}):
            for scope in page.get("items", {}).values():
                yield from scope.get(collection, ())

    def list(
        self, where: tuple[str, str, str], path: str, key: str = "items", filter: str = ""
    ) -> Iterator[dict[str, Any]]:
        for page in self.pages(where, path, {"filter": filter} if filter else {}):
            yield from page.get(key, ())

    def pages(self, where: tuple[str, str, str], path: str, query: Mapping[str, str]) -> Iterator[dict[str, Any]]:
        token = ""
        while True:
            page = self.ask("GET", where, path, query={**query, **({"pageToken": token} if token else {})})
            yield page
            token = page.get("nextPageToken", "")
            if not token:
                return

    def ask(
        self,
        method: str,
        where: tuple[str, str, str],
        path: str,
        body: Mapping[str, Any] | None = None,
        query: Mapping[str, str] | None = None,
    ) -> dict[str, Any]:
        variable, default, prefix = where
        base = self._environ.get(variable, "") or default
        return self.call(method, f"{base.rstrip('/')}{prefix.format(project=self.project)}{path}", body, query)

    def call(
        self, method: str, url: str, body: Mapping[str, Any] | None = None, query: Mapping[str, str] | None = None
    ) -> dict[str, Any]:
        import requests
        from google.auth.exceptions import GoogleAuthError

        session = self._session(method)
        for attempt in (1, 2):
            try:
                answer = session.request(method, url, json=body, params=query, timeout=CALL_SECONDS)
            except GoogleAuthError:
                self._forget_login()
                raise
            except requests.exceptions.RequestException:
                if attempt == 2 or method == "POST":
                    raise
                continue
            if answer.status_code in TRANSIENT and attempt == 1 and method != "POST":
                time.sleep(0.5)
                continue
            break
        if answer.status_code == 401:
            self._forget_login()
        if answer.ok:
            return dict(answer.json()) if answer.content else {}
        raise _answer(answer)

    def _session(self, method: str) -> Any:
        """Return this thread's session, with connections that stay open between calls. For POST, return a new session.

        An open connection may break while idle, and the next call then fails. Callers repeat every failed call except
        POST, so a POST must not use such a connection.
        """
        import requests

        credentials, _ = self.credentials()
        kept_for, kept = getattr(self._kept, "session", (None, None))
        if kept is not None and kept_for is credentials and method != "POST":
            return kept
        if credentials is None:
            session = requests.Session()
        else:
            from google.auth.transport.requests import AuthorizedSession

            session = AuthorizedSession(credentials, refresh_timeout=TOKEN_SECONDS)
        if method != "POST":
            self._kept.session = credentials, session
        return session

    def _forget_login(self) -> None:
        """Drop credentials that Google no longer accepts. The next call reads the user's files anew."""
        with self._lock:
            self._known = None

    def credentials(self) -> tuple[Any, str]:
        """Return the credentials and the project.

        A server that stands in for Google Cloud gets no credentials (None).
        """
        with self._lock:
            if self._known is None:
                named = self._environ.get(PROJECT, "")
                if self._environ.get(COMPUTE[0]):
                    self._known = (None, named)
                else:
                    import google.auth

                    credentials, project = google.auth.default(
                        scopes=["https://www.googleapis.com/auth/cloud-platform"]
                    )
                    self._known = (credentials, named or project or "")
                if not self._known[1]:
                    self._known = None
                    raise CloudRefused(
                        f"Google Cloud is asked on behalf of a project, and none is named; set {PROJECT}, or "
                        "`gcloud config set project PROJECT`"
                    )
            return self._known

    def refresh(self, credentials: Any) -> None:
        """Fetch a token. On a VM of Google Cloud, the name of its service account comes with it."""
        from google.auth.transport.requests import Request

        credentials.refresh(Request())

    def made(self, path: str, name: str, body: Mapping[str, Any], *, global_wait: bool) -> dict[str, Any]:
        resource = self.find(f"{path}/{name}")
        if resource is None:
            with existing_is_fine():
                self.finish(self.ask("POST", COMPUTE, path, {"name": name, **body}))
            resource = self.find(f"{path}/{name}")
        if resource is None:
            raise CloudUnreachable(f"gcp is making {name}; it is asked again")
        return resource

    def find(self, path: str) -> dict[str, Any] | None:
        try:
            return self.ask("GET", COMPUTE, path)
        except Answer as answer:
            if answer.status == 404:
                return None
            raise

    def finish(self, operation: Mapping[str, Any]) -> None:
        """Wait at most `WAIT_SECONDS` for an operation."""
        link = operation.get("selfLink", "")
        path = link.partition("/projects/")[2].partition("/")[2]
        until = time.monotonic() + WAIT_SECONDS
        while operation.get("status") not in (None, "DONE") and path:
            if time.monotonic() > until:
                raise CloudUnreachable(f"gcp is still at {operation.get('operationType')}; it is asked again")
            time.sleep(POLL_SECONDS)
            operation = self.ask("GET", COMPUTE, f"/{path}")
        for error in operation.get("error", {}).get("errors", ()):
            raise Answer(operation.get("httpErrorStatusCode", 400), error.get("code", ""), error.get("message", ""))


def _answer(answer: Any) -> Answer:
    try:
        error = answer.json().get("error", {})
    except ValueError:
        error = {}
    if not isinstance(error, dict):
        error = {}
    reasons = [str(entry.get("reason", "")) for entry in error.get("errors", ())]
    return Answer(answer.status_code, next(iter(reasons), "") or str(error.get("status", "")), error.get("message", ""))


@contextmanager
def missing_is_fine() -> Iterator[None]:
    try:
        yield
    except Answer as answer:
        if answer.status != 404:
            raise


@contextmanager
def existing_is_fine() -> Iterator[None]:
    try:
        yield
    except Answer as answer:
        if answer.status != 409:
            raise


@contextmanager
def errors_named(operation: str, policy: str = "--print-policy gcp") -> Iterator[None]:
    """Convert unhandled answers to CloudUnreachable (unknown state) or CloudRefused.

    `policy`: options of `spotrl check` that print the permissions of this call.
    """
    import requests
    from google.auth import exceptions as auth

    try:
        yield
    except Answer as answer:
        if answer.status in TRANSIENT or answer.reason in ("rateLimitExceeded", "RATE_LIMIT_EXCEEDED"):
            raise CloudUnreachable(f"{operation}: Google Cloud answers {answer}; it is asked again") from None
        if answer.reason in SETTLING or answer.status == 404 or "is not ready" in answer.text:
            raise NotSettled(f"{operation}: Google Cloud does not know it yet ({answer}); it is asked again") from None
        if answer.status == 401:
            raise LoginNeeded(
                f"{operation}: Google Cloud no longer accepts this login ({answer}); {log_in_again('gcp')}"
            ) from None
        advice = advice_on(str(answer)) or f"`spotrl check {policy}` prints what is needed"
        raise CloudRefused(f"{operation}: Google Cloud refused ({answer}); {advice}") from None
    except auth.DefaultCredentialsError:
        raise LoginNeeded(
            "Google Cloud found no credentials; `gcloud auth application-default login` makes some, or "
            "GOOGLE_APPLICATION_CREDENTIALS names a key file"
        ) from None
    except auth.TransportError as error:
        raise CloudUnreachable(f"{operation}: Google Cloud did not answer ({error}); it is asked again") from None
    except auth.GoogleAuthError as error:
        raise LoginNeeded(
            f"{operation}: Google Cloud no longer accepts this login ({error}); {log_in_again('gcp')}"
        ) from None
    except requests.exceptions.RequestException as error:
        raise CloudUnreachable(f"{operation}: Google Cloud did not answer ({error}); it is asked again") from None
