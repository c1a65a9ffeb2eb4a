"""Bodies that are too large or nested too deeply, strange hosts, and names of buckets that no cloud takes."""

import json
import socket

import httpx
import pytest
from pydantic import ValidationError

from engine.config import EngineConfig
from engine.coordinator.bodies import LEAST_CALL_BYTES, SMALL_BYTES, most_call_bytes
from engine.events import Capacity, Progress
from engine.protocol.codec import pack
from launcher.job.schema import Job
from launcher.web.guard import refusal
from tests.engine.test_server import Served as Coordinator
from tests.engine.test_server import headers
from tests.launcher.web.served import TOKEN, serving, two_runs

DEEP = b"[" * 100_000
DEEP_OBJECT = b'{"a":' * 100_000


@pytest.fixture(scope="module")
def coordinator(tmp_path_factory):
    one = Coordinator(tmp_path_factory.mktemp("coordinator"))
    yield one
    one.close()


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    with serving(*two_runs(tmp_path_factory.mktemp("pages"))) as running:
        yield running


def head_only(body):
    return len(body).to_bytes(8, "little") + body


POSTS = ("/call", "/capacity", "/stop", "/ranks?node=n&rank=1&of=1")


@pytest.mark.parametrize("body", [DEEP, DEEP_OBJECT], ids=["arrays", "objects"])
@pytest.mark.parametrize("path", POSTS)
def test_json_nested_too_deeply_is_a_bad_request(coordinator, path, body):
    answer = coordinator.post(path, head_only(body) if path == "/call" else body)
    assert answer.status_code == 400, answer.text
    assert coordinator.get("/health").status_code == 200


@pytest.mark.parametrize("call", [[], {}, 7, None, ["pull"]])
@pytest.mark.parametrize("role", ["trainer", "rollout"])
def test_a_call_whose_name_is_no_text_is_refused(coordinator, role, call):
    assert coordinator.post("/call", pack({"call": call}), role=role).status_code in (400, 403)


@pytest.mark.parametrize("path", POSTS)
@pytest.mark.parametrize("says_length", [True, False])
def test_a_body_that_is_too_large_is_refused_before_it_is_read(coordinator, path, says_length):
    """One that says its length is refused at once; a stream as soon as it is too long."""
    most = LEAST_CALL_BYTES if path == "/call" else SMALL_BYTES
    lines = [f"POST {path} HTTP/1.1", "Host: here"]
    lines += [f"{name}: {value}" for name, value in headers(path.partition("?")[0]).items()]
    lines += [f"Content-Length: {1 << 40}" if says_length else "Transfer-Encoding: chunked", "", ""]
    chunk = b" " * (1 << 20)
    with socket.create_connection(("127.0.0.1", coordinator.port), timeout=30) as connection:
        connection.sendall("\r\n".join(lines).encode())
        try:
            for _ in range(0 if says_length else (most >> 20) + 2):
                connection.sendall(b"%x\r\n%b\r\n" % (len(chunk), chunk))
        except OSError:
            pass  # the answer came first
        answer = connection.recv(4096)
    assert answer.startswith(b"HTTP/1.1 413"), answer


def test_a_body_of_the_largest_size_is_read(coordinator):
    answer = coordinator.post("/capacity", b" " * SMALL_BYTES)
    assert (answer.status_code, "too" in answer.text) == (400, False)


def test_the_largest_call_follows_from_the_job():
    small = EngineConfig()
    large = EngineConfig.model_validate(
        {"model": {"name": "qwen-image", "path": "m", "height": 1024, "width": 1024}, "prompts": "p.txt"}
    )
    assert most_call_bytes(small) == LEAST_CALL_BYTES
    latent = 16 * 128 * 128 * 4
    whole_lease = large.runtime.shape * (large.sampler.steps + 2) * latent
    assert LEAST_CALL_BYTES + whole_lease <= most_call_bytes(large) <= LEAST_CALL_BYTES + 5 * whole_lease


@pytest.mark.parametrize("read", [Capacity.from_json, Progress.from_json])
def test_events_nested_too_deeply_are_no_events(read):
    with pytest.raises(ValueError, match="not a"):
        read('{"nodes":' + DEEP.decode())


# --- spotrl ui


@pytest.mark.parametrize(
    "body",
    [DEEP, DEEP_OBJECT, b'{"confirm": "live"' + b" " * 200_000 + b"}", b"\xff", b"7", b"[]", b'{"confirm": ["live"]}'],
)
def test_a_stop_with_a_strange_body_is_a_bad_request_and_stops_nothing(pages, body):
    answer = httpx.post(f"{pages.url}/api/runs/live/stop?token={TOKEN}", content=body, headers={"Origin": pages.url})
    assert answer.status_code == 400
    assert 'send {"confirm": "live"}' in answer.json()["error"]
    assert pages.stopped == []


@pytest.mark.parametrize(
    "host",
    [
        "127.0.0.1:80@evil.com",
        "127.0.0.1@evil.com",
        "127.0.0.1:80:80",
        "127.0.0.1:",
        "127.0.0.1:x",
        "127.0.0.1:８０",
        "localhost:80/evil",
        "localhost:80#@evil.com",
        "[::1]evil.com",
        "[::1]:80@evil.com",
        "::1:80",
        "evil.com:127.0.0.1",
        "127.0.0.1:80\n",
        "LOCALHOST.evil.com:80",
    ],
)
def test_a_strange_host_is_refused(host):
    why = refusal("GET", {"host": host, "origin": f"http://{host}"}, TOKEN, TOKEN, needs_token=True)
    assert why is not None
    assert "loopback only" in why


# --- names of buckets


def store_of(**stores):
    return Job.model_validate({"store": stores}).store


@pytest.mark.parametrize(
    ("cloud", "url", "words"),
    [
        ("aws", "s3://" + "b" * 3000, "3000 characters, and 3 to 63 are allowed"),
        ("aws", "s3://" + "b" * 64, "64 characters"),
        ("aws", "s3://ab", "2 characters"),
        ("aws", "s3://", "0 characters"),
        ("aws", "s3://my_bucket", "'_'"),
        ("aws", "s3://My-bucket", "'M'"),
        ("aws", "s3://bücket", "'ü'"),
        ("aws", "s3://-bucket", "begin and end"),
        ("aws", "s3://bucket-/x", "begin and end"),
        ("aws", "s3://my..bucket", "two dots"),
        ("aws", "s3://192.168.5.4", "IP address"),
        ("aws", "s3://xn--bucket", "'xn--'"),
        ("aws", "s3://bucket-s3alias", "'-s3alias'"),
        ("aws", "s3://bucket--x-s3", "'--x-s3'"),
        ("aws", "gs://my-bucket", "use a bucket of that cloud"),
        ("aws", "s3://my-bucket/" + "x" * 600, "more than 512 bytes"),
        ("aws", "s3://my-bucket/" + "ü" * 300, "more than 512 bytes"),
        ("aws", "s3://my-bucket/a//b", "an empty part"),
        ("aws", "s3://my-bucket/../b", "'..'"),
        ("aws", "s3://my-bucket/a?b", "'?'"),
        ("aws", "s3://my-bucket/a%2e", "'%'"),
        ("aws", "s3://my-bucket/a\nb", "'\\n'"),
        ("gcp", "gs://" + "b" * 64, "64 characters"),
        ("gcp", "gs://" + "b" * 64 + ".example.com", "a part of its bucket's name has 64"),
        ("gcp", "gs://" + ".".join(["b" * 60] * 4), "243 characters, and 3 to 222"),
        ("gcp", "gs://goog-bucket", "'goog'"),
        ("gcp", "gs://my-google-bucket", "'google'"),
        ("gcp", "gs://my-g00gle-bucket", "'google'"),
        ("gcp", "gs://10.0.0.1", "IP address"),
        ("gcp", "s3://my-bucket", "use a bucket of that cloud"),
    ],
)
def test_a_store_that_its_cloud_would_refuse_is_refused_with_the_rule(cloud, url, words):
    with pytest.raises(ValidationError) as error:
        store_of(**{cloud: url})
    text = error.value.errors()[0]["msg"]
    assert words in text
    assert len(text) < 400


@pytest.mark.parametrize(
    ("cloud", "url"),
    [
        ("aws", "s3://abc"),
        ("aws", "s3://" + "b" * 63 + "/spotrl"),
        ("aws", "s3://my.bucket-1/spotrl/Digits_2/v=1"),
        ("aws", "s3://1bucket/"),
        ("gcp", "gs://my_bucket-1/spotrl"),
        ("gcp", "gs://" + ".".join(["b" * 60] * 3) + "/x"),
    ],
)
def test_a_store_that_its_cloud_takes_is_taken(cloud, url):
    assert store_of(**{cloud: url}) == {cloud: url.rstrip("/")}


def test_one_address_is_read_as_that_of_its_cloud():
    assert Job.model_validate({"store": "gs://my-bucket/x"}).store == {"gcp": "gs://my-bucket/x"}
    assert json.loads(Job.model_validate({"store": "s3://my-bucket"}).model_dump_json())["store"] == {
        "aws": "s3://my-bucket"
    }
