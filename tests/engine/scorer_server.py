"""A scoring server on loopback, in threads of the test process, that speaks the protocols of other projects.

An image's score is the mean of its pixels in [0, 1], so a score for another image is noticed. `faults` holds answers
for the next requests: a status, "garbage", "short", "nan", "range", "drip", "dies", "error" or None for a good answer.
`python -m tests.engine.scorer_server PROTOCOL` prints its address and serves until its input ends. A test can stop that
process.
"""

import base64
import io
import json
import pickle
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
from PIL import Image


class ScorerServer:
    """Counts its requests. `sizes`: images of each request. `heads`: the headers of each request.

    `listed`: number of requests to list models.
    """

    def __init__(self, protocol, faults=()):
        self.protocol, self.faults = protocol, list(faults)
        self.sizes, self.heads, self.asked = [], [], []
        self.retry_after, self.listed = "0", 0
        self.list_faults = []
        """Statuses of the next answers to GET."""
        self.closing = threading.Event()
        self._lock = threading.Lock()
        owner = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self):
                owner.answer(self)

            def do_GET(self):
                owner.listed += 1
                status = owner.list_faults.pop(0) if owner.list_faults else 200
                owner._send(self, b'{"data": []}' if status == 200 else owner.key_of(self), status)

            def log_message(self, *_):
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01})
        self._thread.start()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.closing.set()
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    @staticmethod
    def key_of(request):
        """Return an answer that repeats the key of the request, as a careless server may."""
        return f"key was {request.headers.get('Authorization')}".encode()

    def answer(self, request):
        content = request.rfile.read(int(request.headers["Content-Length"]))
        with self._lock:
            self.heads.append(dict(request.headers))
            fault = self.faults.pop(0) if self.faults else None
        asked = json.loads(content) if self.protocol == "json" else pickle.loads(content)
        self.asked.append(asked)
        self.sizes.append(self._size(asked))
        if isinstance(fault, int):
            return self._send(request, self.key_of(request), fault, {"Retry-After": self.retry_after})
        if fault == "drip":
            request.send_response(200)
            request.send_header("Content-Length", "1000")
            request.end_headers()
            while not self.closing.wait(0.02):
                request.wfile.write(b"1")
                request.wfile.flush()
            return None
        if fault == "dies":
            request.send_response(200)
            request.send_header("Content-Length", "1000")
            request.end_headers()
            request.wfile.write(b"half")
            request.close_connection = True
            return None
        if fault == "garbage":
            return self._send(request, b"<html>busy</html>")
        told = {"error": "the GPU is out of memory"} if fault == "error" else self._told(asked, fault)
        return self._send(request, json.dumps(told).encode() if self.protocol == "json" else pickle.dumps(told))

    def _size(self, asked):
        return len(asked["images"])

    def _told(self, asked, fault):
        scores = self._scores(asked)
        if fault == "short":
            scores = scores[:-1]
        if fault in ("nan", "range"):
            scores[0] = float("nan") if fault == "nan" else 7.5
        if self.protocol == "json":
            return {"scores": scores, "metrics": {"words": [float(len(prompt)) for prompt in asked["prompts"]]}}
        if self.protocol == "verl-omni":
            assert asked["metadata"] == {}
            return {"scores": [np.float32(score) for score in scores]}
        # As in the GenEval server: a graded score, the two verdicts, and verdicts by tag with -10 for other tags.
        tags = [one["tag"] for one in asked["meta_datas"]]
        strict = [float(score > 0.5) for score in scores]
        return {
            "scores": scores,
            "rewards": [1.0] * len(scores) if asked["only_strict"] is False else [0.0] * len(scores),
            "strict_rewards": strict,
            "group_rewards": {tag: [-10.0] for tag in tags},
            "group_strict_rewards": {tag: [-10.0] for tag in tags},
        }

    def _scores(self, asked):
        files = asked["images"]
        if self.protocol == "json":
            files = [base64.b64decode(one, validate=True) for one in files]
        form = "PNG" if self.protocol == "json" else "JPEG"
        images = [Image.open(io.BytesIO(one), formats=[form]) for one in files]
        assert len(images) == len(asked["prompts"])
        return [float(np.asarray(image.convert("RGB")).mean() / 255) for image in images]

    def _send(self, request, body, status=200, more=None):
        request.send_response(status)
        for name, value in {**(more or {}), "Content-Length": str(len(body))}.items():
            request.send_header(name, value)
        request.end_headers()
        request.wfile.write(body)


if __name__ == "__main__":
    with ScorerServer(sys.argv[1]) as server:
        print(server.url, flush=True)
        sys.stdin.read()
