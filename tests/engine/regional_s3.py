"""S3 with its region check: a request signed for a region other than the bucket's is refused.

    client -> RegionalS3 (checks the signature's region) -> moto (keeps the objects)

moto takes a request signed for any region. S3 answers 400 AuthorizationHeaderMalformed.
"""

import http.client
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import boto3
from moto.server import ThreadedMotoServer

SCOPE = re.compile(r"Credential=[^/]+/\d{8}/([a-z0-9-]+)/s3/")
HOP = {"connection", "transfer-encoding", "content-length", "server", "date"}
"""Headers that this server sets itself."""


class RegionalS3:
    """One bucket in `region`. `signed_for`: the regions that requests were signed for."""

    def __init__(self, region, bucket):
        self.region, self.bucket, self.signed_for = region, bucket, set()
        self._moto = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
        self._moto.start()
        self._kept = self._moto.get_host_and_port()
        self._client = boto3.client(
            "s3",
            endpoint_url="http://{}:{}".format(*self._kept),
            region_name=region,
            aws_access_key_id="test",
            aws_secret_access_key="test",
        )
        self._client.create_bucket(Bucket=bucket, CreateBucketConfiguration={"LocationConstraint": region})
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()

    def read(self, key):
        return self._client.get_object(Bucket=self.bucket, Key=key)["Body"].read()

    def close(self):
        self._server.shutdown()
        self._server.server_close()
        # All servers of moto in one process keep their buckets in one place.
        for item in self._client.list_objects_v2(Bucket=self.bucket).get("Contents", []):
            self._client.delete_object(Bucket=self.bucket, Key=item["Key"])
        self._client.delete_bucket(Bucket=self.bucket)
        self._moto.stop()

    def _ask(self, method, path, body, headers):
        connection = http.client.HTTPConnection(*self._kept, timeout=10)
        connection.request(method, path, body, headers)
        answer = connection.getresponse()
        return answer.status, answer.getheaders(), answer.read()

    def _handler(s3):
        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def _answer(self):
                body = self.rfile.read(int(self.headers.get("content-length", 0)))
                signed = SCOPE.search(self.headers.get("authorization", ""))
                # A request for a bucket's region may be signed for any region.
                asks_for_region = self.path.endswith("?location")
                if signed and not asks_for_region:
                    s3.signed_for.add(signed[1])
                if signed and signed[1] != s3.region and not asks_for_region:
                    wrong = f"the region '{signed[1]}' is wrong; expecting '{s3.region}'"
                    text = f"<Error><Code>AuthorizationHeaderMalformed</Code><Message>{wrong}</Message></Error>"
                    status, headers, data = 400, [("x-amz-bucket-region", s3.region)], text.encode()
                else:
                    status, headers, data = s3._ask(self.command, self.path, body, dict(self.headers))
                self.send_response(status)
                for name, value in headers:
                    if name.lower() not in HOP:
                        self.send_header(name, value)
                length = {name.lower(): value for name, value in headers}.get("content-length", "0")
                self.send_header("content-length", length if self.command == "HEAD" else str(len(data)))
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(data)

            do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _answer

            def log_message(self, *arguments):
                pass

        return Handler
