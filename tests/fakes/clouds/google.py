"""Google's host names: one TLS server behind compute, storage, iam, ... of googleapis.com, and its certificate.

/etc/hosts of every process in the world maps the names to this server. The certificate authority is the world's own,
and clients find it by their usual environment variables, so Google's clients need no special setting.
"""

import json
import ssl
import sys
import threading
import traceback
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qsl, urlsplit

from tests.fakes.clouds import addresses
from tests.fakes.clouds.gce import CLIENT_EMAIL, Gce, LostReply, Refused
from tests.fakes.clouds.gcs import Gcs

KNOWN = {401: "UNAUTHENTICATED", 403: "PERMISSION_DENIED", 404: "NOT_FOUND", 409: "ALREADY_EXISTS"}
STATUS = {**KNOWN, 400: "INVALID_ARGUMENT", 412: "FAILED_PRECONDITION", 429: "RESOURCE_EXHAUSTED", 503: "UNAVAILABLE"}


def serve(gce: Gce, gcs: Gcs, folder: Path, say: Callable[[str], None], public_of: Callable[[str], str]) -> None:
    """Start the server. `public_of`: returns the public address of a host's private one, else the client's."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: object) -> None:
            pass

        def answer(self) -> None:
            length = int(self.headers.get("Content-Length") or 0)
            raw = self.rfile.read(length) if length else self._chunks()
            host = (self.headers.get("Host") or "").partition(":")[0]
            url = urlsplit(self.path)
            query = dict(parse_qsl(url.query, keep_blank_values=True))
            if host == addresses.CHECK_IP:
                return self._send(
                    200, f"{public_of(self.client_address[0])}\n".encode(), {"Content-Type": "text/plain"}
                )
            is_store = host.startswith("storage.") or url.path.startswith(("/storage/v1", "/upload/", "/download/"))
            try:
                if is_store:
                    headers = {name.lower(): value for name, value in self.headers.items()}
                    answer = gcs.answer(self.command, url.path, query, headers, raw)
                    return self._send(answer.status, answer.data, dict(answer.headers))
                token = (self.headers.get("Authorization") or "").removeprefix("Bearer ")
                answer = gce.answer(host, self.command, url.path, query, raw, token)
            except Refused as error:
                if "does not know" in str(error):
                    say(f"google: {error}")
                return self._refuse(error.status, error.reason, str(error))
            except Exception as error:
                if not isinstance(error, LostReply):
                    say(f"google: {self.command} {host}{self.path}\n{traceback.format_exc()}")
                    return self._refuse(500, "internalError", repr(error))
                self.close_connection = True
                self.connection.close()
                return None
            data = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
            return self._send(200, data, {"Content-Type": "application/json; charset=UTF-8"})

        do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = do_HEAD = answer

        def _chunks(self) -> bytes:
            if self.headers.get("Transfer-Encoding", "").lower() != "chunked":
                return b""
            data = b""
            while size := int(self.rfile.readline().partition(b";")[0], 16):
                data += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
            return data

        def _refuse(self, status: int, reason: str, message: str) -> None:
            one = {"message": message, "domain": "usageLimits" if status == 403 else "global", "reason": reason}
            error = {"code": status, "message": message, "errors": [one], "status": STATUS.get(status, "UNKNOWN")}
            body = {"error": error}
            if reason == "invalid_grant":  # the token endpoint speaks OAuth
                body = {"error": reason, "error_description": message}
            self._send(status, json.dumps(body).encode(), {"Content-Type": "application/json"})

        def _send(self, status: int, data: bytes, headers: dict[str, str]) -> None:
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            if status != 204:
                self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            if self.command != "HEAD" and status != 204:
                self.wfile.write(data)

    class Server(ThreadingHTTPServer):
        daemon_threads = True
        request_queue_size = 64

        def finish_request(self, request: object, client_address: object) -> None:
            # The handshake runs in the connection's own thread, so a hanging one does not block others.
            request = context.wrap_socket(request, server_side=True)  # type: ignore[arg-type]
            super().finish_request(request, client_address)

        def handle_error(self, request: object, client_address: object) -> None:
            if not isinstance(sys.exc_info()[1], OSError | ValueError):
                say(f"google: {traceback.format_exc()}")

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "google.pem", folder / "google.key")
    server = Server((addresses.API, 443), Handler)
    threading.Thread(target=server.serve_forever, args=(0.1,), daemon=True).start()


def write_certificates(folder: Path) -> None:
    """Write `ca.pem`, and `google.pem` with `google.key` for Google's names."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

    now = datetime.now(UTC)

    def certificate(name: str, issuer: str, key: ec.EllipticCurvePrivateKey, is_ca: bool) -> x509.CertificateBuilder:
        def named(common: str) -> x509.Name:
            return x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, common)])

        return (
            x509.CertificateBuilder()
            .subject_name(named(name))
            .issuer_name(named(issuer))
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - timedelta(days=1))
            .not_valid_after(now + timedelta(days=30))
            .add_extension(x509.BasicConstraints(ca=is_ca, path_length=None), critical=True)
        )

    ours, theirs = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
    authority = "fake clouds"
    root = certificate(authority, authority, ours, True).sign(ours, hashes.SHA256())
    names = x509.SubjectAlternativeName([x509.DNSName(name) for name in (*addresses.GOOGLE_NAMES, addresses.CHECK_IP)])
    leaf = certificate("googleapis.com", authority, theirs, False).add_extension(names, critical=False)
    (folder / "ca.pem").write_bytes(root.public_bytes(Encoding.PEM))
    (folder / "google.pem").write_bytes(leaf.sign(ours, hashes.SHA256()).public_bytes(Encoding.PEM))
    key = theirs.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    (folder / "google.key").write_bytes(key)


def write_service_account(path: Path) -> None:
    """Write a service account file with a unique key."""
    from cryptography.hazmat.primitives.asymmetric import rsa
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

    key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    account = {
        "type": "service_account",
        "project_id": addresses.PROJECT,
        "private_key_id": "fake",
        "private_key": key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()).decode(),
        "client_email": CLIENT_EMAIL,
        "client_id": "1",
        "token_uri": "https://oauth2.googleapis.com/token",
    }
    path.write_text(json.dumps(account))
    path.chmod(0o600)
