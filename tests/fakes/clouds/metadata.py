"""The metadata services of instances at 169.254.169.254.

EC2's (IMDSv2 only: a token is required) and Google's (`Metadata-Flavor: Google` is required, `wait_for_change` waits).
Each host has its own server, whose socket is created inside the host's network namespace while the server runs outside.
Each answer is read from the cloud at the request: a cloud implements `Face`.
"""

import ctypes
import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Protocol
from urllib.parse import parse_qs, urlsplit

from tests.fakes.clouds import addresses

CLONE_NEWNET = 0x40000000
LONGEST_WAIT_S = 3600
ROLE_KEY = "ASIAFAKE"
"""Beginning of the access keys of instance profiles."""


class Face(Protocol):
    """The metadata of one instance."""

    cloud: str

    def paths(self) -> Mapping[str, str]:
        """Return every path that has an answer now, without its root (`latest/`, `computeMetadata/v1/`)."""


def serve(pid: int, face: Face) -> Callable[[], None]:
    """Serve inside the network namespace of `pid` until the returned function is called."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: object) -> None:
            pass

        def do_GET(self) -> None:
            (_ec2 if face.cloud == "aws" else _google)(self, face, server)

        def do_PUT(self) -> None:
            (_ec2_token if face.cloud == "aws" else _google)(self, face, server)

    listener = _inside(pid, _listen)
    server = ThreadingHTTPServer((addresses.METADATA, 80), Handler, bind_and_activate=False)
    server.socket.close()
    server.socket = listener
    server.daemon_threads = True
    server.tokens = set()  # type: ignore[attr-defined]
    threading.Thread(target=server.serve_forever, args=(0.1,), daemon=True).start()

    def stop() -> None:
        server.shutdown()
        server.server_close()

    return stop


def _listen() -> socket.socket:
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    # The host's own address may be added a moment later, so bind to a missing address.
    listener.setsockopt(socket.IPPROTO_IP, 15, 1)  # IP_FREEBIND
    listener.bind((addresses.METADATA, 80))
    listener.listen(64)
    return listener


def _inside(pid: int, make: Callable[[], socket.socket]) -> socket.socket:
    """Return a socket created in another network namespace. Only the calling thread enters it."""
    libc = ctypes.CDLL(None, use_errno=True)
    here, there = (os.open(f"/proc/{who}/ns/net", os.O_RDONLY) for who in ("thread-self", pid))
    try:
        if libc.setns(there, CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), "setns")
        try:
            return make()
        finally:
            if libc.setns(here, CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), "setns back")
    finally:
        os.close(here)
        os.close(there)


def _answer(http: BaseHTTPRequestHandler, status: int, text: str, headers: Mapping[str, str] | None = None) -> None:
    data = text.encode()
    http.send_response(status)
    for name, value in {"Content-Type": "text/plain", "Content-Length": str(len(data)), **(headers or {})}.items():
        http.send_header(name, value)
    http.end_headers()
    http.wfile.write(data)


def _listing(paths: Mapping[str, str], path: str) -> str | None:
    """Return the content of a folder: one name a line, folders with a slash; None if there is none."""
    folder = path.rstrip("/") + "/" if path.strip("/") else ""
    names = {name[len(folder) :].partition("/") for name in paths if name.startswith(folder)}
    return "\n".join(sorted(first + slash for first, slash, _ in names)) or None


# --- EC2 ---------------------------------------------------------------------------------------------


def _ec2_token(http: BaseHTTPRequestHandler, _: Face, server: ThreadingHTTPServer) -> None:
    life = http.headers.get("X-aws-ec2-metadata-token-ttl-seconds", "")
    if http.path != "/latest/api/token" or not life.isdigit():
        return _answer(http, 400, "Bad Request")
    token = secrets.token_urlsafe(32)
    server.tokens.add(token)  # type: ignore[attr-defined]
    return _answer(http, 200, token, {"X-aws-ec2-metadata-token-ttl-seconds": life})


def _ec2(http: BaseHTTPRequestHandler, face: Face, server: ThreadingHTTPServer) -> None:
    if http.headers.get("X-aws-ec2-metadata-token") not in server.tokens:  # type: ignore[attr-defined]
        return _answer(http, 401, "Unauthorized")
    paths, path = face.paths(), urlsplit(http.path).path.removeprefix("/latest/")
    found = paths.get(path.rstrip("/"))
    if found is None:
        found = _listing(paths, path)
    return _answer(http, 404, "Not Found") if found is None else _answer(http, 200, found)


def ec2_time(at: datetime) -> str:
    return at.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def role_credentials(role: str) -> str:
    """Return credentials of the instance profile. They are accepted, because signatures are not checked."""
    return json.dumps(
        {
            "Code": "Success",
            "LastUpdated": ec2_time(datetime.now(UTC)),
            "Type": "AWS-HMAC",
            "AccessKeyId": ROLE_KEY + role.upper().replace("-", "")[:12],
            "SecretAccessKey": "fake-instance-secret",
            "Token": "fake-instance-token",
            "Expiration": ec2_time(datetime.now(UTC) + timedelta(hours=6)),
        }
    )


# --- Google ------------------------------------------------------------------------------------------


def _google(http: BaseHTTPRequestHandler, face: Face, _: ThreadingHTTPServer) -> None:
    headers = {"Metadata-Flavor": "Google", "Server": "Metadata Server for VM"}
    if http.headers.get("Metadata-Flavor") != "Google":
        return _answer(http, 403, "Missing Metadata-Flavor:Google header.", headers)
    url = urlsplit(http.path)
    query = {key: values[0] for key, values in parse_qs(url.query, keep_blank_values=True).items()}
    path = url.path.removeprefix("/computeMetadata/v1").strip("/")
    if url.path == "/":
        return _answer(http, 200, "computeMetadata/\n", headers)
    before = _google_answer(face.paths(), path, query)
    if query.get("wait_for_change", "").lower() == "true":
        patience = min(float(query.get("timeout_sec", LONGEST_WAIT_S)), LONGEST_WAIT_S)
        until = time.monotonic() + patience
        if query.get("last_etag", "") in ("", _etag(before)):
            while _google_answer(face.paths(), path, query) == before and time.monotonic() < until:
                time.sleep(0.1)
            before = _google_answer(face.paths(), path, query)
    if before is None:
        return _answer(http, 404, "Not Found", headers)
    kind = "application/json" if before.startswith(("{", "[")) else "application/text"
    return _answer(http, 200, before, headers | {"ETag": _etag(before), "Content-Type": kind})


def _etag(text: str | None) -> str:
    return f"{hash(text) & 0xFFFFFFFFFFFFFFFF:016x}"


def _google_answer(paths: Mapping[str, str], path: str, query: Mapping[str, str]) -> str | None:
    if path in paths:
        return paths[path]
    if query.get("recursive", "").lower() == "true":
        inside = {name[len(path) :].strip("/"): text for name, text in paths.items() if name.startswith(path)}
        lists = {name: text.split("\n") for name, text in inside.items() if name in ("scopes", "aliases")}
        return json.dumps(inside | lists) if inside else None
    return _listing(paths, path)
