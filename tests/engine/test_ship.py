"""Log shipping: each byte of a spot node's logs reaches the trainer and the store once, despite outages of both."""

import threading
import time

import httpx
import pytest
import uvicorn

from engine.clock import ScaledClock
from engine.config import RuntimeConfig
from engine.coordinator.open import open_coordinator
from engine.coordinator.rights import Rights
from engine.coordinator.server import CoordinatorServer, Front, bind
from engine.node_spec import role_token
from engine.storage.ship import PIECE_BYTES, NotShippable, Shipping, StoreCopy, begin_shipping, keep_piece
from tests.engine.fleet import TOKEN, free_port
from tests.engine.test_node_agent_on_cloud import spec_of

SPOT_TOKEN = role_token(TOKEN, "rollout")


class Trainer:
    """A coordinator that stores logs and keeps its port over restarts."""

    def __init__(self, folder, port):
        self.folder, self.port = folder, port
        clock = ScaledClock(origin_ms=0)
        coordinator = open_coordinator(folder / "coordinator", clock=clock, runtime=RuntimeConfig())
        app = CoordinatorServer(Front(coordinator), Rights(TOKEN), shipped=folder / "shipped").app
        self._listener = bind("127.0.0.1", port)
        self._server = uvicorn.Server(uvicorn.Config(app, log_level="warning", ws="none", timeout_graceful_shutdown=1))
        self._thread = threading.Thread(target=self._server.run, args=([self._listener],))
        self._thread.start()
        while not self._server.started:
            time.sleep(0.01)

    def has(self, file, node="spot-0"):
        path = self.folder / "shipped" / node / file
        return path.read_bytes() if path.exists() else b""

    def post(self, token=SPOT_TOKEN, content=b"x", **query):
        url = f"http://127.0.0.1:{self.port}/ship"
        headers = {"Authorization": f"Bearer {token}"}
        return httpx.post(url, params=query, headers=headers, content=content, trust_env=False)

    def close(self):
        self._server.should_exit = True
        self._thread.join()
        self._listener.close()


def spec(folder, port, **more):
    return spec_of(folder, coordinator_port=port, **more)


@pytest.fixture
def logs(tmp_path):
    (tmp_path / "spot/logs").mkdir(parents=True)
    return tmp_path / "spot/logs"


@pytest.fixture
def trainer(tmp_path):
    one = Trainer(tmp_path / "trainer", free_port())
    yield one
    one.close()


def ship(logs, trainer):
    shipping = Shipping(spec(logs.parent, trainer.port), every_seconds=3600)
    shipping.end()  # a second attempt is the first to arrive
    return shipping


def test_appended_lines_arrive_in_order_and_once(logs, trainer):
    (logs / "agent.log").write_bytes(b"one\n")
    (logs / "worker-0.log").write_bytes(b"w" * (2 * PIECE_BYTES + 7))
    shipping = ship(logs, trainer)
    assert trainer.has("agent.log") == b"one\n"
    assert trainer.has("worker-0.log") == b"w" * (2 * PIECE_BYTES + 7)
    with (logs / "agent.log").open("ab") as log:
        log.write(b"two\n")
    shipping.once()
    ship(logs, trainer)  # a restarted agent continues at the coordinator's position
    assert trainer.has("agent.log") == b"one\ntwo\n"


def test_an_unreachable_trainer_loses_no_log_and_a_new_one_gets_all(logs, trainer, tmp_path):
    (logs / "agent.log").write_bytes(b"one\n")
    shipping = ship(logs, trainer)
    trainer.close()
    (logs / "agent.log").write_bytes(b"one\ntwo\n")
    with pytest.raises(httpx.HTTPError):
        shipping.once()
    other = Trainer(tmp_path / "other", trainer.port)
    try:
        shipping.once()
        assert other.has("agent.log") == b"one\ntwo\n"
    finally:
        other.close()


def test_the_log_shipper_sends_and_retries_on_its_own(logs, tmp_path):
    port = free_port()
    shipping = Shipping(spec(logs.parent, port), every_seconds=0.05)
    (logs / "agent.log").write_bytes(b"one\n")
    time.sleep(0.3)
    trainer = Trainer(tmp_path / "trainer", port)
    try:
        until = time.monotonic() + 60
        while trainer.has("agent.log") != b"one\n":
            assert time.monotonic() < until
            time.sleep(0.05)
    finally:
        shipping.end()
        trainer.close()


def test_a_full_disk_of_the_coordinator_is_a_507(trainer):
    (trainer.folder / "shipped").write_text("where the folder should be")
    assert trainer.post(node="spot-0", file="agent.log", offset=0).status_code == 507


@pytest.mark.parametrize(
    ("query", "token", "content", "status"),
    [
        ({"node": "spot-0", "file": "agent.log", "offset": 0}, "guessed", b"", 401),
        ({"node": "..", "file": "agent.log", "offset": 0}, SPOT_TOKEN, b"", 400),
        ({"node": "spot-0", "file": "../../agent.log", "offset": 0}, SPOT_TOKEN, b"", 400),
        ({"node": "spot-0", "file": "authorized_keys", "offset": 0}, SPOT_TOKEN, b"", 400),
        ({"node": "spot-0", "file": "agent.log", "offset": "x"}, SPOT_TOKEN, b"", 400),
        ({"node": "spot-0"}, SPOT_TOKEN, b"", 400),
        ({"node": "spot-0", "file": "agent.log", "offset": 0}, SPOT_TOKEN, b"x" * (PIECE_BYTES + 1), 413),
    ],
)
def test_an_invalid_log_upload_is_refused(trainer, query, token, content, status):
    assert trainer.post(token, content, **query).status_code == status


def test_a_log_piece_out_of_order_is_ignored(tmp_path):
    assert keep_piece(tmp_path, "spot-0", "a.log", 0, b"abc") == 3
    assert keep_piece(tmp_path, "spot-0", "a.log", 0, b"abc") == 3  # the answer was lost
    assert keep_piece(tmp_path, "spot-0", "a.log", 9, b"abc") == 3
    hostile = [
        ("spot-0", "a/b.log"),
        ("spot-0/../..", "a.log"),
        ("../spot-0", "a.log"),
        ("spot-0", "a.log/../../b.log"),
    ]
    for node, file in [*hostile, ("spot-0\n", "a.log"), ("", "a.log"), ("spot-0", ".log")]:
        with pytest.raises(NotShippable):
            keep_piece(tmp_path, node, file, 0, b"")


def test_a_log_ends_at_the_largest_size(tmp_path, monkeypatch):
    """Otherwise a spot node fills the trainer's disk."""
    monkeypatch.setattr("engine.storage.ship.LONGEST_LOG_BYTES", 4)
    assert keep_piece(tmp_path, "spot-0", "a.log", 0, b"abc") == 3
    assert keep_piece(tmp_path, "spot-0", "a.log", 3, b"de") == 3
    assert keep_piece(tmp_path, "spot-0", "a.log", 3, b"d") == 4


def test_the_trainers_node_copies_changed_logs_to_the_store(tmp_path):
    for path, text in {
        "logs/agent.log": "agent\n",
        "progress/trainer.jsonl": "{}\n",
        "shipped/spot-0/agent.log": "spot\n",
        "metrics/metrics.jsonl": "{}\n",
        "metrics/tensorboard/events.out.tfevents.1": "event",
        "node.json": "secret",
    }.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    copy = StoreCopy(spec(tmp_path, 1, node="trainer", role="trainer"), every_seconds=3600)
    copy.once()
    metrics = tmp_path / "store/metrics/trainer"
    assert (metrics / "metrics.jsonl").read_text() == "{}\n"
    assert (metrics / "tensorboard/events.out.tfevents.1").read_text() == "event"
    stored = {path.relative_to(tmp_path / "store/logs").as_posix() for path in (tmp_path / "store/logs").rglob("*.*")}
    assert stored == {"trainer/agent.log", "trainer/trainer.jsonl", "spot-0/agent.log"}
    (tmp_path / "store/logs/trainer/agent.log").unlink()
    with (tmp_path / "shipped/spot-0/agent.log").open("a") as log:
        log.write("more\n")
    copy.end()
    assert (tmp_path / "store/logs/spot-0/agent.log").read_text() == "spot\nmore\n"
    assert not (tmp_path / "store/logs/trainer/agent.log").exists()  # the file had not changed


def test_a_trainers_copy_never_shortens_a_log_sent_by_the_node(tmp_path):
    """A spot node that terminates itself uploads its log; its trainer ends later with a shorter copy."""
    store = tmp_path / "store"
    sent = store / "logs" / "spot-1" / "agent.log"
    sent.parent.mkdir(parents=True)
    sent.write_text("this agent ends: finished\nguard: no controller has called\n")
    shipped = tmp_path / "shipped" / "spot-1" / "agent.log"
    shipped.parent.mkdir(parents=True)
    shipped.write_text("this agent ends: finished\n")
    copy = StoreCopy(spec(tmp_path, 1, node="trainer", role="trainer"), starts=False)
    copy.once()
    assert sent.read_text().endswith("guard: no controller has called\n")
    shipped.write_text("this agent ends: finished\nguard: no controller has called\nand more\n")
    copy.once()
    assert sent.read_text().endswith("and more\n")


def test_a_store_that_cannot_be_reached_delays_an_end_by_seconds_at_most(tmp_path, monkeypatch, capsys):
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs/agent.log").write_text("agent\n")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    monkeypatch.setenv("AWS_ALLOW_HTTP", "true")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "a")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "b")
    copy = StoreCopy(spec(tmp_path, 1, role="trainer", store="s3://no-such-bucket/run"), every_seconds=0.05)
    copy._last = 0.5
    time.sleep(0.2)
    began = time.monotonic()
    copy.end()
    assert time.monotonic() - began < 10.0


def test_no_log_is_shipped_on_the_local_infra(tmp_path):
    assert begin_shipping(spec(tmp_path, 1, cloud="local")) is None
