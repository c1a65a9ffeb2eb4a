"""The coordinator over real HTTP: tokens, patience, and nothing acknowledged that is not durable."""

import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
import uvicorn

from engine.clock import ScaledClock
from engine.events import Capacity, Market, NodeCapacity, NodeState
from engine.rollout.queue import Task
from engine.rollout.request import Finished, Kind, RequestId, Score, WeightsKey
from engine.rollout.wire import finished_to_dict, pack, task_to_dict, weights_to_list
from engine.runtime.coordinator import Coordinator, digest_of
from engine.runtime.journal import Journal
from engine.runtime.server import CoordinatorServer
from engine.runtime.transport import CallRefused, CoordinatorLost, HttpTransport

TOKEN = "a token"
V0 = WeightsKey(version=0)
HOLDS = [0, False, digest_of(b"w")]


class Front:
    """A coordinator with its HTTP front on a loopback port, in a thread."""

    def __init__(self, folder, port=0, lease_ms=60_000):
        self.folder = folder
        clock = ScaledClock(origin_ms=time.time_ns() // 1_000_000)
        self.coordinator = Coordinator(folder, clock=clock, lease_ms=lease_ms)
        self._listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._listener.bind(("127.0.0.1", port))
        self.port = self._listener.getsockname()[1]
        app = CoordinatorServer(self.coordinator, TOKEN).app
        self._server = uvicorn.Server(uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=1))
        self._thread = threading.Thread(target=self._server.run, args=([self._listener],))
        self._thread.start()

    def close(self):
        self._server.should_exit = True
        self._thread.join()
        self._listener.close()

    def transport(self, *, token=TOKEN, patience_seconds=5.0):
        return HttpTransport("127.0.0.1", self.port, token, patience_seconds=patience_seconds)

    def post(self, path, content, token=TOKEN):
        url = f"http://127.0.0.1:{self.port}{path}"
        return httpx.post(url, content=content, headers={"Authorization": f"Bearer {token}"}, trust_env=False)


class SlowJournal(Journal):
    """Takes its time to sync, as a disk does, and counts."""

    def __init__(self, folder):
        self.synced = []
        super().__init__(folder)

    def sync(self):
        time.sleep(0.02)
        size = self._path.stat().st_size
        super().sync()
        self.synced.append(size)


@pytest.fixture(scope="module")
def front(tmp_path_factory):
    one = Front(tmp_path_factory.mktemp("server"))
    yield one
    one.close()


@pytest.fixture
def fresh(tmp_path):
    one = Front(tmp_path)
    yield one
    one.close()


def submit(transport, count, *, batch=0, shape=1):
    requests = tuple(
        RequestId(run="run", lineage=1, batch=batch, prompt="1234", seed=seed, kind=Kind.TRAIN) for seed in range(count)
    )
    task = Task(requests=requests, weights=V0, sampler="plan", steps=8, shape=shape, dtype="float32")
    transport.call({"call": "publish", "weights": weights_to_list(V0)}, {"weights": b"w"})
    transport.call({"call": "submit", "task": task_to_dict(task)})
    return requests


def pull(transport, worker="spot/0", *, known=(), wait=False):
    node = worker.split("/")[0]
    head = {"call": "pull", "worker": worker, "node": node, "holds": HOLDS, "known": list(known)}
    return transport.call(head, wait=wait)[0]


def test_a_wrong_token_is_refused_on_every_route(front):
    with pytest.raises(CallRefused, match="401"):
        front.transport(token="guessed").call({"call": "peek"})
    for path in ("/call", "/capacity", "/stop"):
        assert front.post(path, b"{}", token="guessed").status_code == 401
    assert httpx.get(f"http://127.0.0.1:{front.port}/health", trust_env=False).status_code == 401


def test_health_says_the_lineage(front):
    headers = {"Authorization": f"Bearer {TOKEN}"}
    answer = httpx.get(f"http://127.0.0.1:{front.port}/health", headers=headers, trust_env=False)
    assert answer.json() == {"lineage": 0}


@pytest.mark.parametrize("body", [b"", b"x", b"\0" * 8, pack({"no": "call"}), pack({"call": "dance"})])
def test_a_message_that_is_not_understood_is_a_400(front, body):
    assert front.post("/call", body).status_code == 400


@pytest.mark.parametrize(("path", "body"), [("/capacity", b"{}"), ("/stop", b"x"), ("/stop", b"[]")])
def test_a_body_that_is_not_understood_is_a_400(front, path, body):
    assert front.post(path, body).status_code == 400


def test_an_unknown_call_is_refused_with_its_reason(front):
    with pytest.raises(CallRefused, match="does not know the call 'dance'"):
        front.transport().call({"call": "dance"})


def test_a_patient_pull_waits_for_work_and_wakes_when_it_comes(fresh):
    worker, trainer = fresh.transport(), fresh.transport()
    began = time.perf_counter()
    assert pull(worker, wait=True)["do"] == "wait"
    assert time.perf_counter() - began >= 0.4
    patient = {"call": "pull", "worker": "spot/0", "node": "spot", "holds": HOLDS, "known": [], "wait_ms": 2000}
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(worker.call, patient)
        time.sleep(0.05)
        submitted = time.perf_counter()
        submit(trainer, 1)
        assert waiting.result()[0]["do"] in ("work", "load_weights")
        assert time.perf_counter() - submitted < 1.5


def test_usage_of_a_call_that_is_kept_waiting_counts_once(fresh):
    head = {"call": "pull", "worker": "spot/0", "node": "spot", "holds": HOLDS, "known": [], "of": 1}
    fresh.transport().call(head | {"usage": {"sync": 7.0}}, wait=True)
    assert fresh.coordinator._usage["spot"]["sync"] == 7.0


def test_the_launchers_snapshot_makes_a_node_drain(fresh):
    transport = fresh.transport()
    submit(transport, 1)
    node = NodeCapacity(node="spot", market=Market.SPOT, state=NodeState.DRAINING, workers=1, deadline_ms=123)
    assert fresh.post("/capacity", Capacity(generation=1, nodes=(node,)).to_json()).status_code == 200
    assert pull(transport) == {"do": "drain", "deadline_ms": 123}


def test_told_to_stop_the_trainer_and_the_workers_hear_it(fresh):
    transport = fresh.transport()
    assert fresh.post("/stop", b'{"reason": "budget"}').status_code == 200
    assert pull(transport) == {"do": "exit", "reason": "budget"}
    answer, _ = transport.call({"call": "collect", "kind": "train", "batch": 0, "have": 0}, wait=True)
    assert answer["stop"] == "budget"


def test_finishes_at_the_same_time_share_fsyncs_and_none_is_acknowledged_before_it_is_durable(fresh):
    journal = SlowJournal(fresh.folder)
    fresh.coordinator.journal = journal
    transports = [fresh.transport() for _ in range(12)]
    requests = submit(transports[0], len(transports))
    leases = [pull(transport, f"s{i}/0")["lease"] for i, transport in enumerate(transports)]
    before = len(journal.synced)

    def finish(i):
        result = Finished(request=requests[i], score=Score(reward=0.0, metrics={}), trajectory=f"t{i}")
        head = {"call": "finish", "worker": f"s{i}/0", "node": f"s{i}", "lease": leases[i]}
        answer, _ = transports[i].call(head | {"results": [finished_to_dict(result)]}, {f"t{i}": b"x" * 100})
        start, size = journal._blobs[f"t{i}"]
        return answer["do"] == "wait" and max(journal.synced) >= start + size

    with ThreadPoolExecutor(len(transports)) as pool:
        assert all(pool.map(finish, range(len(transports))))
    assert 1 <= len(journal.synced) - before <= len(transports) // 2
    again = Journal(fresh.folder)
    assert all(again.blob(f"t{i}") == b"x" * 100 for i in range(len(transports)))


def test_after_a_compaction_a_record_is_still_synced_before_it_is_acknowledged(fresh):
    """The journal is shorter then: its length alone does not say what is durable."""
    journal = SlowJournal(fresh.folder)
    fresh.coordinator.journal = journal
    transport = fresh.transport()
    submit(transport, 4, batch=0)
    transport.call({"call": "withdraw", "batches": [["train", 0]]})
    before = len(journal.synced)
    submit(transport, 1, batch=1)
    assert len(journal.synced) == before + 2


def test_a_full_disk_is_said_and_nothing_is_remembered(fresh):
    class FullJournal(Journal):
        def append(self, record, blobs=None):
            raise OSError(28, "No space left on device")

    fresh.coordinator.journal = FullJournal(fresh.folder)
    task = Task(requests=(), weights=V0, sampler="plan", steps=8, shape=1, dtype="float32")
    with pytest.raises(CallRefused, match="No space left"):
        fresh.transport().call({"call": "submit", "task": task_to_dict(task)})


def test_a_coordinator_that_does_not_answer_is_lost_when_patience_ends():
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        port = nobody.getsockname()[1]
    began = time.perf_counter()
    with pytest.raises(CoordinatorLost, match="no answer"):
        HttpTransport("127.0.0.1", port, TOKEN, patience_seconds=0.3).call({"call": "peek"})
    assert time.perf_counter() - began < 2.0


def test_a_coordinator_that_comes_back_in_time_is_found_again(tmp_path):
    first = Front(tmp_path)
    transport = first.transport()
    transport.call({"call": "hello", "lineage": 3})
    first.close()
    with ThreadPoolExecutor(1) as pool:
        asking = pool.submit(transport.call, {"call": "peek"})
        second = Front(tmp_path, port=first.port)
        assert asking.result()[0]["lineage"] == 3
        second.close()


class FullDisk:
    """A progress file on a disk that has no room left, until it has."""

    def __init__(self):
        self.full = True
        self.told = []

    def write(self, lineage, event):
        if self.full:
            raise OSError(28, "No space left on device")
        self.told.append(event.KIND)


def test_a_full_disk_under_the_progress_file_delays_the_news_and_stops_nothing(tmp_path):
    disk = FullDisk()
    front = Front(tmp_path)
    try:
        front.coordinator._progress = disk
        front.transport().call({"call": "heartbeat", "worker": "w", "node": "n", "leases": {}})
        time.sleep(0.3)
        assert disk.told == []
        disk.full = False
        until = time.monotonic() + 5.0
        while not disk.told:
            assert time.monotonic() < until
            time.sleep(0.02)
        assert disk.told == ["node_seen"]
    finally:
        front.close()
