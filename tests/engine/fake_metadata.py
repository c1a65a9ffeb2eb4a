"""Metadata services and Google's Compute API as small servers on loopback; tests set the answers."""

import contextlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit


class FakeService:
    """Answers by path. `requests`: method and path of each; `texts[path]`: the answer, else 404."""

    def __init__(self):
        self.texts: dict[str, str] = {}
        self.requests: list[tuple[str, str]] = []
        self.refusing = 0
        """Number of the next requests that are answered with 503."""
        self.changed = threading.Condition()
        face = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do(self):
                face.requests.append((self.command, self.path))
                if face.refusing:
                    face.refusing -= 1
                    code, text = 503, "not now"
                else:
                    code, text = face.answer(self.command, self.path, self.headers)
                body = text.encode()
                self.send_response(code)
                self.send_header("Content-Length", str(len(body)))
                self.send_header("ETag", str(abs(hash(text))))
                with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # who asked was killed by its test
                    self.end_headers()
                    self.wfile.write(body)

            do_GET = do_PUT = do_DELETE = do

            def log_message(self, *arguments):
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.address = f"127.0.0.1:{self._server.server_port}"
        self.url = f"http://{self.address}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,))
        self._thread.start()

    def answer(self, method, path, headers):
        found = self.texts.get(path)
        return (404, "nothing here") if found is None else (200, found)

    def set_text(self, path, text):
        with self.changed:
            self.texts[path] = text
            self.changed.notify_all()

    def close(self):
        with self.changed:
            self.changed.notify_all()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class FakeImds(FakeService):
    """IMDSv2: a request needs a token, and only the newest token is valid."""

    def __init__(self):
        self.tokens = 0
        super().__init__()

    def answer(self, method, path, headers):
        if (method, path) == ("PUT", "/latest/api/token"):
            assert headers["X-aws-ec2-metadata-token-ttl-seconds"]
            self.tokens += 1
            return 200, f"token-{self.tokens}"
        if headers.get("X-aws-ec2-metadata-token") != f"token-{self.tokens}":
            return 401, "no valid token"
        return super().answer(method, path.removeprefix("/latest/"), headers)

    def is_instance(self, instance_id, region="us-east-1"):
        self.set_text("dynamic/instance-identity/document", json.dumps({"instanceId": instance_id, "region": region}))
        self.set_text("meta-data/iam/security-credentials/", "spotrl-node")
        credentials = {"AccessKeyId": "ASIA0", "SecretAccessKey": "secret", "Token": "session", "Code": "Success"}
        self.set_text(
            "meta-data/iam/security-credentials/spotrl-node",
            json.dumps({**credentials, "Expiration": "2099-01-01T00:00:00Z"}),
        )


class FakeGceMetadata(FakeService):
    """Google's metadata service: a request needs its header; with wait_for_change it answers when the text changes."""

    def answer(self, method, path, headers):
        if headers.get("Metadata-Flavor") != "Google":
            return 403, "no Metadata-Flavor"
        url = urlsplit(path)
        query, name = parse_qs(url.query), url.path.removeprefix("/computeMetadata/v1/")
        if query.get("wait_for_change") == ["true"]:
            known = query["last_etag"][0]
            with self.changed:
                self.changed.wait_for(
                    lambda: str(abs(hash(self.texts.get(name)))) != known, timeout=float(query["timeout_sec"][0])
                )
        return super().answer(method, name, headers)

    def is_instance(self, name, zone="us-central1-a"):
        for path, text in {
            "project/project-id": "a-project",
            "instance/name": name,
            "instance/zone": f"projects/123/zones/{zone}",
            "instance/service-accounts/default/token": json.dumps({"access_token": "ya29.x", "expires_in": 3000}),
            "instance/preempted": "FALSE",
            "instance/maintenance-event": "NONE",
        }.items():
            self.set_text(path, text)


class FakeCompute(FakeService):
    """Compute API that deletes instances for requests with a valid token."""

    def __init__(self):
        self.deleted: list[str] = []
        super().__init__()

    def answer(self, method, path, headers):
        if headers.get("Authorization") != "Bearer ya29.x":
            return 401, "no valid credentials"
        assert method == "DELETE"
        self.deleted.append(path)
        return 200, json.dumps({"kind": "compute#operation", "status": "PENDING"})
