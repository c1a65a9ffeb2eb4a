"""The coordinator over real HTTP: tokens, waiting calls, and durable writes before an acknowledgement."""

import asyncio
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import get_args

import httpx
import pytest
import uvicorn

from engine.clock import ScaledClock
from engine.config import RuntimeConfig
from engine.coordinator import server
from engine.coordinator.journal import Journal
from engine.coordinator.open import open_coordinator
from engine.coordinator.rights import CALLS_OF_A_SPOT_NODE, Rights
from engine.coordinator.server import CoordinatorServer, Front, bind
from engine.coordinator.weight_book import digest_of
from engine.events import Capacity, Market, NodeCapacity, NodeState
from engine.node_spec import role_token
from engine.protocol.codec import pack
from engine.protocol.messages import Call, tag_of
from engine.protocol.request import Finished, Kind, RequestId, Score, WeightsKey
from engine.protocol.task import Task
from engine.worker.transport import CallRefused, CoordinatorLost, HttpTransport
from tests.engine.heads import finished_to_dict, request_to_list, task_to_dict, weights_to_list

TOKEN = "a token"
V0 = WeightsKey(version=0)
HOLDS = [0, False, digest_of(b"w")]


class Served:
    """A coordinator with its HTTP front on loopback, in a thread. `ended`: reasons for which it would have exited."""

    def __init__(self, folder, port=0, ray_address=None):
        self.folder = folder
        self.ended = []
        clock = ScaledClock(origin_ms=time.time_ns() // 1_000_000)
        runtime = RuntimeConfig(lease_seconds=60.0, first_lease_seconds=60.0)
        self.coordinator = open_coordinator(folder, clock=clock, runtime=runtime)
        self._listener = bind("127.0.0.1", port)
        self._listener.listen()  # a request that comes before the thread serves waits
        self.port = self._listener.getsockname()[1]
        front = Front(self.coordinator, end=self.ended.append)
        app = CoordinatorServer(front, Rights(TOKEN), ray_address=ray_address).app
        self._server = uvicorn.Server(uvicorn.Config(app, log_level="warning", ws="none", timeout_graceful_shutdown=1))
        self._thread = threading.Thread(target=self._server.run, args=([self._listener],))
        self._thread.start()

    def close(self):
        self._server.should_exit = True
        self._thread.join()
        self._listener.close()

    def transport(self, *, role="trainer", token=None, patience_seconds=30.0):
        token = token or role_token(TOKEN, role)
        return HttpTransport("127.0.0.1", self.port, token, patience_seconds=patience_seconds)

    def get(self, path, **who):
        url = f"http://127.0.0.1:{self.port}{path}"
        return httpx.get(url, headers=headers(path, **who), trust_env=False)

    def post(self, path, content, **who):
        url = f"http://127.0.0.1:{self.port}{path}"
        return httpx.post(url, content=content, headers=headers(path, **who), trust_env=False)


def headers(path, *, role=None, token=None):
    """Return the headers of this role, by default of a role that may use this path."""
    role = role or ("controller" if path in ("/capacity", "/stop") else "trainer")
    return {"Authorization": f"Bearer {token or role_token(TOKEN, role)}"}


class SlowJournal(Journal):
    """A journal with a slow sync that counts its syncs."""

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
    one = Served(tmp_path_factory.mktemp("server"))
    yield one
    one.close()


@pytest.fixture
def fresh(tmp_path):
    one = Served(tmp_path)
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


def pull_head(worker="spot/0", *, boot=1, seq=1):
    node = worker.split("/")[0]
    return {"call": "pull", "worker": worker, "node": node, "boot": boot, "seq": seq, "holds": HOLDS}


def pull(transport, worker="spot/0", *, boot=1, seq=1, wait=False):
    return transport.call(pull_head(worker, boot=boot, seq=seq), wait=wait)[0]


def test_a_wrong_token_is_refused_on_every_route(front):
    with pytest.raises(CallRefused, match="401"):
        front.transport(token="guessed").call({"call": "peek"})
    for path in ("/call", "/capacity", "/stop", "/ship"):
        assert front.post(path, b"{}", token="guessed").status_code == 401
    for path in ("/health", "/ray", "/presence?worker=spot/0&node=spot&boot=1"):
        assert front.get(path, token="guessed").status_code == 401


def test_the_runs_own_token_is_refused(front):
    assert front.get("/health", token=TOKEN).status_code == 401


@pytest.mark.parametrize("role", ["rollout", "trainer"])
def test_only_the_controller_may_stop_the_run_or_post_capacity(front, role, capsys):
    assert front.post("/stop", b'{"reason": "a stolen token"}', role=role).status_code == 403
    assert front.post("/capacity", Capacity(generation=1, nodes=()).to_json(), role=role).status_code == 403
    assert front.coordinator.queue.stop_reason is None
    log = capsys.readouterr().out
    assert f"the token of the role {role} does not allow /stop" in log
    assert f"the token of the role {role} does not allow /capacity" in log


def test_a_further_node_of_the_trainer_may_make_a_workers_calls_and_no_others(front):
    def status(call):
        return front.post("/call", pack({"call": call, "node": "ranks-1"}), role="ranks").status_code

    of_a_worker = {"pull", "heartbeat", "finish", "commit", "give_back", "fault", "states"}
    of_judges = {"hold_money", "bill_judge", "take_turn"}
    calls = {tag_of(call) for call in get_args(Call)}
    assert {call for call in calls if status(call) != 403} == of_a_worker | of_judges
    assert front.post("/call", pack(pull_head("ranks-1/trainer-rank-1")), role="ranks").status_code == 200


@pytest.mark.parametrize("call", ["publish", "stop", "submit", "withdraw", "hello", "explore", "node_lost", "died"])
def test_a_spot_node_may_not_change_the_run(front, call, capsys):
    body = pack({"call": call, "node": "spot", "weights": weights_to_list(V0), "reason": "x"}, {"weights": b"poison"})
    answer = front.post("/call", body, role="rollout")
    assert answer.status_code == 403
    assert answer.text == f"the token of the role rollout does not allow the call {call!r} of spot"
    assert answer.text in capsys.readouterr().out
    assert front.coordinator.queue.live is None


def test_a_spot_node_works_from_lease_to_result_with_its_own_token(fresh):
    (request,) = submit(fresh.transport(), 1)
    spot = fresh.transport(role="rollout")
    lease = pull(spot)["lease"]
    head = {"worker": "spot/0", "node": "spot", "lease": lease}
    assert spot.call({"call": "heartbeat", "worker": "spot/0", "node": "spot", "leases": {str(lease): 1}})[0]
    state = [request_to_list(request), 2, "state"]
    assert spot.call({"call": "commit", **head, "states": [state]}, {"state": b"s"})[0]["do"] == "wait"
    result = Finished(request=request, score=Score(reward=1.0, metrics={}), trajectory="t")
    done = spot.call({"call": "finish", **head, "results": [finished_to_dict(result)]}, {"t": b"x"})
    assert done[0]["do"] == "wait"
    assert spot.call({"call": "weights", "weights": weights_to_list(V0)})[1] == {"weights": b"w"}
    assert request in fresh.coordinator.queue.finished
    assert {"pull", "heartbeat", "commit", "finish", "weights"} <= CALLS_OF_A_SPOT_NODE


def test_the_controller_may_not_pull_work(front):
    assert front.post("/call", pack(pull_head()), role="controller").status_code == 403


def test_health_reports_the_lineage(front):
    assert front.get("/health").json() == {"lineage": 0, "trouble": None}


def test_the_address_of_a_runs_ray_cluster_is_served(front, tmp_path):
    assert front.get("/ray").status_code == 404
    served = Served(tmp_path, ray_address="127.0.0.1:4711")
    try:
        assert served.get("/ray").json() == {"address": "127.0.0.1:4711"}
    finally:
        served.close()


@pytest.mark.parametrize("query", ["", "?worker=spot/0&node=spot", "?worker=spot/0&node=spot&boot=x"])
def test_a_presence_call_without_a_valid_worker_is_a_400(front, query):
    assert front.get(f"/presence{query}").status_code == 400


def test_a_worker_whose_connection_closes_loses_its_lease_at_once(fresh, monkeypatch):
    """The lease would last a minute. The closed connection of the old process does not affect its successor."""
    monkeypatch.setattr(server, "LONGEST_WAIT_SECONDS", 60.0)
    transport = fresh.transport()
    requests = submit(transport, 1)
    assert pull(transport, "spot/0", boot=7)["do"] == "work"
    assert pull(transport, "other/0")["do"] == "wait"
    for boot, seq, wait_ms, taken in ((6, 2, 500, "wait"), (7, 3, 60_000, "work")):
        url = f"http://127.0.0.1:{fresh.port}/presence?worker=spot/0&node=spot&boot={boot}"
        with httpx.stream("GET", url, headers=headers("/presence"), trust_env=False) as presence:
            assert presence.status_code == 200
            assert pull(transport, "other/0", seq=10 * seq)["do"] == "wait"
        closed = time.monotonic()
        answer, _ = transport.call({**pull_head("other/0", seq=10 * seq + 1), "wait_ms": wait_ms})
        assert answer["do"] == taken
        if taken == "work":
            assert time.monotonic() - closed < 30.0
            assert len(answer["attempts"]) == len(requests)


@pytest.mark.parametrize("body", [b"", b"x", b"\0" * 8, pack({"no": "call"}), pack({"call": "dance"})])
def test_an_invalid_message_is_a_400(front, body):
    assert front.post("/call", body).status_code == 400


@pytest.mark.parametrize(("path", "body"), [("/capacity", b"{}"), ("/stop", b"x"), ("/stop", b"[]")])
def test_an_invalid_body_is_a_400(front, path, body):
    assert front.post(path, body).status_code == 400


def test_an_unknown_call_is_refused_with_its_reason(front):
    with pytest.raises(CallRefused, match="does not know the call 'dance'"):
        front.transport().call({"call": "dance"})


def test_a_patient_pull_waits_and_wakes_when_work_comes(fresh, monkeypatch):
    monkeypatch.setattr(server, "LONGEST_WAIT_SECONDS", 60.0)
    worker, trainer = fresh.transport(), fresh.transport()
    began = time.perf_counter()
    assert pull(worker, wait=True)["do"] == "wait"
    assert time.perf_counter() - began >= 0.4
    patient = {**pull_head(seq=2), "wait_ms": 60_000}
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(worker.call, patient)
        time.sleep(0.05)
        submitted = time.perf_counter()
        submit(trainer, 1)
        assert waiting.result()[0]["do"] in ("work", "load_weights")
        assert time.perf_counter() - submitted < 30.0


def test_the_usage_of_a_waiting_call_counts_once(fresh):
    fresh.transport().call({**pull_head(), "of": 1, "usage": [["sync", 0.0, 7.0]]}, wait=True)
    assert fresh.coordinator.usage.nodes["spot"].phase_ms["sync"] == 7.0


def test_the_launchers_snapshot_makes_a_node_drain(fresh):
    transport = fresh.transport()
    submit(transport, 1)
    node = NodeCapacity(node="spot", market=Market.SPOT, state=NodeState.DRAINING, workers=1, deadline_ms=123)
    assert fresh.post("/capacity", Capacity(generation=1, nodes=(node,)).to_json()).status_code == 200
    assert pull(transport) == {"do": "drain", "deadline_ms": 123}


def test_a_stop_order_reaches_the_trainer_and_the_workers(fresh):
    transport = fresh.transport()
    assert fresh.post("/stop", b'{"reason": "budget"}').status_code == 200
    assert pull(transport) == {"do": "exit", "reason": "budget"}
    answer, _ = transport.call({"call": "collect", "kind": "train", "batch": 0, "have": 0}, wait=True)
    assert answer["stop"] == "budget"


def test_simultaneous_finishes_share_an_fsync_before_they_are_acknowledged(fresh):
    journal = SlowJournal(fresh.folder)
    fresh.coordinator.log.journal = journal
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


def test_a_record_after_a_compaction_is_synced_before_it_is_acknowledged(fresh):
    """The journal is shorter after a compaction, so its length does not show what is durable."""
    journal = SlowJournal(fresh.folder)
    fresh.coordinator.log.journal = journal
    transport = fresh.transport()
    submit(transport, 4, batch=0)
    transport.call({"call": "withdraw", "batches": [["train", 0]]})
    before = len(journal.synced)
    submit(transport, 1, batch=1)
    assert len(journal.synced) == before + 2


class FullJournal(Journal):
    """A journal on a disk that is full until the test frees it."""

    full = True

    def append(self, record, blobs=None, **how):
        if self.full:
            raise OSError(28, "No space left on device")
        super().append(record, blobs, **how)


def test_a_full_disk_is_reported_until_space_is_free_and_nothing_is_stored(fresh):
    fresh.coordinator.log.journal = journal = FullJournal(fresh.folder)
    task = Task(requests=(), weights=V0, sampler="plan", steps=8, shape=1, dtype="float32")
    body = pack({"call": "submit", "task": task_to_dict(task)})
    answer = fresh.post("/call", body)
    assert (answer.status_code, "No space left" in answer.text) == (507, True)
    capacity = Capacity(generation=1, nodes=()).to_json()
    assert "No space left" in fresh.get("/health").json()["trouble"]
    assert "No space left" in fresh.post("/capacity", capacity).json()["trouble"]
    assert fresh.ended == []
    journal.full = False
    assert fresh.post("/call", body).status_code == 200
    assert fresh.get("/health").json()["trouble"] is None
    assert fresh.post("/capacity", capacity).json() == {"ok": True, "trouble": None}


def test_a_coordinator_whose_fsync_fails_exits_without_acknowledging(fresh):
    class BrokenJournal(Journal):
        def sync(self):
            raise OSError(5, "Input/output error")

    fresh.coordinator.log.journal = BrokenJournal(fresh.folder)
    task = Task(requests=(), weights=V0, sampler="plan", steps=8, shape=1, dtype="float32")
    assert fresh.post("/call", pack({"call": "submit", "task": task_to_dict(task)})).status_code != 200
    assert len(fresh.ended) == 1
    assert "Input/output error" in fresh.ended[0]


def test_a_silent_coordinator_is_lost_after_the_callers_timeout():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    began = time.perf_counter()
    with pytest.raises(CoordinatorLost, match="no answer"):
        HttpTransport("127.0.0.1", port, role_token(TOKEN, "trainer"), patience_seconds=0.3).call({"call": "peek"})
    assert time.perf_counter() - began < 20.0


def test_a_coordinator_that_comes_back_in_time_answers_the_call(tmp_path):
    first = Served(tmp_path)
    transport = first.transport()
    transport.call({"call": "hello", "lineage": 3})
    first.close()
    with ThreadPoolExecutor(1) as pool:
        asking = pool.submit(transport.call, {"call": "peek"})
        second = Served(tmp_path, port=first.port)
        assert asking.result()[0]["lineage"] == 3
        second.close()


class FullDisk:
    """A progress file on a disk that is full until the test frees it."""

    def __init__(self):
        self.full = True
        self.written = []

    def write(self, lineage, event):
        if self.full:
            raise OSError(28, "No space left on device")
        self.written.append(event.KIND)

    def flush(self):
        pass


def test_a_full_disk_delays_progress_events_and_stops_nothing(tmp_path):
    disk = FullDisk()
    front = Served(tmp_path)
    try:
        front.coordinator._progress = disk
        pull(front.transport())
        time.sleep(0.3)
        assert disk.written == []
        disk.full = False
        until = time.monotonic() + 60.0
        while not disk.written:
            assert time.monotonic() < until
            time.sleep(0.02)
        assert disk.written == ["node_seen"]
    finally:
        front.close()


def test_a_caller_that_disconnects_during_its_call_is_no_server_error(monkeypatch):
    """Killed workers do this. If the server did not handle it, each would leave a traceback in the log."""
    rights = SimpleNamespace(check=lambda token, path: None)
    app = CoordinatorServer(SimpleNamespace(), rights).app
    sent = []

    async def receive():
        return {"type": "http.disconnect"}

    async def send(message):
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": "/call", "headers": [], "query_string": b""}
    asyncio.run(app(scope, receive, send))
    assert sent[0]["status"] == 499
