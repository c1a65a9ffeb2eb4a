"""The nodes of a trainer, as the coordinator hears them, and the ranks of each. Real runs: test_rank_survival.py."""

import errno
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from types import SimpleNamespace

import httpx
import pytest

from engine.algorithm_config import AlgorithmConfig
from engine.config import EngineConfig, ModelConfig, RuntimeConfig
from engine.coordinator.rank_nodes import RankNodes
from engine.events import Market, Phase
from engine.node import trainer_nodes
from engine.node.child import Deaths, progress_of
from engine.node.trainer_nodes import (
    SIGN_SECONDS,
    OtherNodes,
    RankCalls,
    RankReport,
    copy_meeting,
    meeting_file,
)
from engine.node_spec import ClockConfig, NodeSpec, role_token
from engine.protocol.rank_meeting import NO_MEETING, RankMeeting, RanksFound, read_meeting, write_meeting
from engine.trainer_ranks import NodeOfTrainer
from tests.engine.fleet import TOKEN
from tests.engine.served import Served


class Clock:
    """Seconds that a test sets."""

    now = 0.0

    def __call__(self):
        return self.now


def config(ranks):
    return EngineConfig(
        model=ModelConfig(weights="lora"),
        algorithm=AlgorithmConfig(prompts_per_batch=8, updates_per_batch=1),
        runtime=RuntimeConfig(trainer_ranks=ranks),
    )


def spec(folder, *, number, port=1, role=None, nodes=2):
    role = role or ("ranks" if number else "trainer")
    return NodeSpec(
        run="r",
        node=f"node-{number}",
        role=role,
        trainer_nodes=nodes,
        trainer_node=number,
        market=Market.ON_DEMAND,
        folder=str(folder),
        store="file:///nowhere",
        coordinator_port=port,
        token=TOKEN if role == "trainer" else role_token(TOKEN, role),
        clock=ClockConfig(origin_ms=0),
        engine=config(nodes),
    )


def test_each_node_has_as_many_ranks():
    shares = [NodeOfTrainer(number=number, nodes=3).ranks(config(6)) for number in range(3)]
    assert [list(share) for share in shares] == [[0, 1], [2, 3], [4, 5]]
    with pytest.raises(
        ValueError, match=r"6 ranks cannot be divided over 4 nodes; set runtime.trainer_ranks to a mult"
    ):
        NodeOfTrainer(number=0, nodes=4).ranks(config(6))


@pytest.mark.parametrize(("weights", "room", "sampling"), [("lora", False, 2), ("full", False, 1), ("full", True, 2)])
def test_a_rank_samples_if_it_has_all_weights_or_room_for_them(tmp_path, weights, room, sampling):
    node = spec(tmp_path, number=1).model_copy(update={"ranks_have_room": room})
    model = node.engine.model.model_copy(update={"weights": weights})
    assert (
        node.model_copy(update={"engine": node.engine.model_copy(update={"model": model})}).sampling_ranks == sampling
    )


@pytest.mark.parametrize(("role", "number"), [("trainer", 1), ("rollout", 1), ("ranks", 0), ("ranks", 2)])
def test_only_a_further_node_of_the_trainer_has_a_number(tmp_path, role, number):
    with pytest.raises(ValueError, match=rf"role {role} is number {number} of 2 trainer nodes"):
        spec(tmp_path, number=number, role=role)


def test_silence_is_counted_from_the_last_sign_of_the_newest_node(tmp_path):
    clock = Clock()
    nodes = RankNodes(tmp_path / "ranks.json", clock)
    clock.now = 2.0
    assert nodes.found(0).heard_ms == {}
    assert nodes.found(0).silent_ms(1) == 2000, "a coordinator that restarted heard nothing, and waits first"
    nodes.answer(1, 0, 0)
    clock.now = 5.0
    assert nodes.found(0).silent_ms(1) == 3000
    nodes.answer(1, 1, 0)
    clock.now = 9.0
    late = nodes.answer(1, 0, 0)
    assert late.meeting.is_over, "a node that comes back after its successor came has no place"
    assert late.heard_ms == {1: 4000}, "and is no sign of life of its successor"
    assert not nodes.answer(1, 1, 0).meeting.is_over
    restarted = RankNodes(tmp_path / "ranks.json", clock)
    assert not restarted.answer(1, 1, 0).meeting.is_over
    assert restarted.answer(1, 0, 0).meeting.is_over, "a restarted coordinator knows the newer node too"


def test_an_unreadable_meeting_is_none(tmp_path):
    file = tmp_path / "ranks.json"
    assert read_meeting(file) == NO_MEETING
    file.write_text('{"port": "x"}')
    assert read_meeting(file) == NO_MEETING
    write_meeting(file, RankMeeting(generation=7, port=9))
    assert RankNodes(file).found(4).meeting == RankMeeting(generation=7, port=9, iteration=4)


def test_the_coordinator_tells_only_the_trainers_nodes_where_ranks_meet(tmp_path):
    first, second = spec(tmp_path, number=0), spec(tmp_path, number=1)
    served = Served(tmp_path / "coordinator", ranks=RankNodes(meeting_file(first)))
    try:
        first, second = (one.model_copy(update={"coordinator_port": served.port}) for one in (first, second))
        write_meeting(meeting_file(first), RankMeeting(generation=7, port=9))
        assert RankCalls(first).ask().heard_ms == {}, "rank 0 asks, and is no further node"
        assert RankCalls(second).ask().meeting == RankMeeting(generation=7, port=9)
        assert 1 in RankCalls(first).ask().heard_ms
        for role in ("rollout", "controller"):
            headers = {"Authorization": f"Bearer {role_token(TOKEN, role)}"}
            url = f"http://127.0.0.1:{served.port}/ranks?number=1&generation=0"
            assert httpx.get(url, headers=headers, trust_env=False).status_code == 403
        stranger = second.model_copy(update={"token": "stolen"})
        assert RankCalls(stranger).ask() is None
        for path in ("/weights", "/capacity", "/stop"):
            headers = {"Authorization": f"Bearer {second.own_token}"}
            url = f"http://127.0.0.1:{served.port}{path}"
            call = httpx.get if path == "/weights" else httpx.post
            assert call(url, headers=headers, trust_env=False).status_code == 403, "such a node changes no run"
    finally:
        served.close()


def test_the_work_of_a_further_node_is_in_the_usage_of_that_node(tmp_path):
    served = Served(tmp_path / "coordinator", ranks=RankNodes(tmp_path / "ranks.json"))
    try:
        node = spec(tmp_path, number=1, port=served.port)
        report = RankReport(node, 1, of=1)
        report.send()
        usage = served.coordinator.usage
        assert list(usage.nodes) == ["node-1"], "the node is seen as soon as it joins"
        with report.usage.measure(Phase.TRAINING):
            time.sleep(0.02)
        report.send()
        assert usage.nodes["node-1"].phase_ms["training"] == pytest.approx(report.usage.total["training"])
        headers = {"Authorization": f"Bearer {node.own_token}"}
        url = f"http://127.0.0.1:{served.port}/ranks?node=node-1&rank=1&of=1"
        assert httpx.post(url, content='[["play", 0, 1]]', headers=headers, trust_env=False).status_code == 400
    finally:
        served.close()


def test_rank_0_waits_for_nodes_never_heard_and_gives_up_only_silent_ones(tmp_path):
    others = OtherNodes(spec(tmp_path, number=0, nodes=3))
    heard = RanksFound(meeting=NO_MEETING, heard_ms={1: 2_000}, up_ms=5_000)
    assert others.absent(heard) == [2], "node 2 has not come"
    assert others.silent(heard) == [], "the coordinator restarted 5 s ago"
    late = RanksFound(meeting=NO_MEETING, heard_ms={1: 9_000, 2: 0}, up_ms=60_000)
    assert (others.absent(late), others.silent(late)) == ([1], []), "a node just lost is not waited for in vain"
    silent = RanksFound(meeting=NO_MEETING, heard_ms={1: 10_001, 2: 0}, up_ms=60_000)
    assert others.silent(silent) == [1]
    assert others.absent(None) == [1, 2]


def test_a_new_iteration_forgives_a_further_node_its_torn_groups(tmp_path):
    node = spec(tmp_path, number=1)
    deaths = Deaths(lambda: progress_of(node))
    deaths.add_torn()
    write_meeting(meeting_file(node), RankMeeting(iteration=1))
    deaths.add_torn()
    assert deaths.torn == 1


@pytest.fixture
def script(monkeypatch):
    """Answers of a coordinator in turn, and what happens whenever the caller sleeps. `slept`: seconds of each sleep."""
    made = SimpleNamespace(answers=[], slept=[], sleeps=lambda: None)

    def sleep(seconds):
        made.slept.append(seconds)
        made.sleeps()

    monkeypatch.setattr(trainer_nodes, "RankCalls", lambda spec: SimpleNamespace(ask=lambda: made.answers.pop(0)))
    monkeypatch.setattr(trainer_nodes, "time", SimpleNamespace(sleep=sleep))
    return made


def found(meeting=NO_MEETING, **heard_ms):
    heard = {int(node.removeprefix("node_")): at_ms for node, at_ms in heard_ms.items()}
    return RanksFound(meeting=meeting, heard_ms=heard, up_ms=60_000)


def test_a_further_node_copies_each_meeting_until_the_run_is_over(tmp_path, script, monkeypatch):
    """A coordinator that restarted knows no iteration yet, and the disk is full for a moment."""
    node, written, copies = spec(tmp_path, number=1), [], []

    def write(file, meeting):
        written.append(meeting)
        if len(written) == 1:
            raise OSError(errno.ENOSPC, "No space left on device")
        write_meeting(file, meeting)

    monkeypatch.setattr(trainer_nodes, "write_meeting", write)
    script.sleeps = lambda: copies.append(read_meeting(meeting_file(node)))
    first, none = RankMeeting(generation=7, port=9, iteration=3), RankMeeting(generation=7)
    script.answers = [None, found(first), found(first), found(first), found(none), found(RankMeeting(is_over=True))]
    copy_meeting(node)
    assert copies == [NO_MEETING, NO_MEETING, first, first, RankMeeting(generation=7, iteration=3)]
    assert len(written) == 3, "an equal meeting is not written again"
    assert script.slept == [SIGN_SECONDS] * 5, "each question is a sign of life"


def test_rank_0_waits_until_every_further_node_was_heard_and_says_for_which(tmp_path, script, capsys):
    script.answers = [None, found(node_1=0), found(node_1=0), found(node_1=0, node_2=2999)]
    others = OtherNodes(with_nodes(spec(tmp_path, number=0, nodes=3), "whole"))
    assert others.wait() == (0, 1, 2)
    assert script.answers == []
    assert capsys.readouterr().out == "waits for the trainer's nodes [1, 2]\nwaits for the trainer's nodes [2]\n"
    assert OtherNodes(spec(tmp_path, number=0, nodes=1)).wait() == (0,)


def with_nodes(spec, trainer_nodes):
    """Return the spec with another `runtime.trainer_nodes`."""
    runtime = spec.engine.runtime.model_copy(update={"trainer_nodes": trainer_nodes})
    return spec.model_copy(update={"engine": spec.engine.model_copy(update={"runtime": runtime})})


@pytest.mark.parametrize(
    ("asked", "weights", "may"), [("auto", "lora", True), ("auto", "full", False), ("whole", "lora", False)]
)
def test_only_lora_may_lack_ranks_unless_the_job_wants_all(tmp_path, asked, weights, may):
    made = with_nodes(spec(tmp_path, number=0), asked)
    engine = made.engine.model_copy(update={"model": made.engine.model.model_copy(update={"weights": weights})})
    assert made.model_copy(update={"engine": engine}).may_lack_ranks is may


def test_full_weights_cannot_lack_a_node():
    with pytest.raises(ValueError, match=r"trainer_nodes is elastic, but model.weights is full.*use .*whole"):
        EngineConfig(model={"weights": "full"}, runtime=RuntimeConfig(trainer_nodes="elastic"))


def test_a_trainer_that_may_lack_a_node_waits_for_it_for_less_than_a_minute(tmp_path, script, capsys):
    """Node 2 was lost, and node 1 restarts its agent."""
    script.answers = [
        None,
        found(node_1=20_000, node_2=40_000),
        found(node_1=0, node_2=49_999),
        found(node_1=0, node_2=50_000),
    ]
    others = OtherNodes(spec(tmp_path, number=0, nodes=3))
    assert others.wait() == (0, 1)
    said = "waits for the trainer's nodes [1, 2]\nwaits for the trainer's nodes [2]\n"
    assert capsys.readouterr().out == said + "trains without the trainer's nodes [2]\n"
    assert script.answers == []
    silent = RanksFound(meeting=NO_MEETING, heard_ms={1: 0, 2: 99_000}, up_ms=120_000)
    assert others.silent(silent) == [], "the group does without node 2"
    assert others.silent(RanksFound(meeting=NO_MEETING, heard_ms={1: 10_001}, up_ms=120_000)) == [1]


def test_a_trainer_that_may_lack_nodes_waits_for_those_never_heard_from_the_coordinators_start(tmp_path, script):
    young = RanksFound(meeting=NO_MEETING, heard_ms={}, up_ms=49_999)
    script.answers = [young, found()]
    assert OtherNodes(spec(tmp_path, number=0, nodes=3)).wait() == (0,)
    assert script.answers == []


def test_a_group_may_grow_when_a_node_that_it_lacks_was_heard(tmp_path, script):
    script.answers = [found(node_1=0, node_2=60_000)]
    others = OtherNodes(spec(tmp_path, number=0, nodes=3))
    assert others.wait() == (0, 1)
    script.answers = [None, found(node_1=0, node_2=60_000), found(node_1=4_000, node_2=100)]
    assert [others.have_come() for _ in range(3)] == [False, False, True]
    script.answers = [found(node_1=0, node_2=0)]
    whole = OtherNodes(spec(tmp_path, number=0, nodes=3))
    assert whole.wait() == (0, 1, 2)
    assert whole.have_come() is False, "asked nobody: the group lacks none"


def test_rank_0_leaves_for_a_silent_node_and_not_for_a_coordinator_that_does_not_answer(tmp_path, script, capsys):
    script.answers = [None, found(node_1=10_000, node_2=0), found(node_1=10_001, node_2=0)]
    others = OtherNodes(spec(tmp_path, number=0, nodes=3))
    assert [others.are_silent() for _ in range(3)] == [False, False, True]
    assert capsys.readouterr().out == "the trainer's nodes [1] are silent\n"


@pytest.mark.parametrize(("status", "body"), [(500, b'{"meeting": {}, "heard_ms": {}, "up_ms": 1}'), (200, b"no json")])
def test_a_coordinator_that_answers_badly_or_not_at_all_is_no_error(tmp_path, status, body):
    class Bad(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(status)
            self.end_headers()
            self.wfile.write(body)

        do_POST = do_GET

        def log_message(self, *_): ...

    with HTTPServer(("127.0.0.1", 0), Bad) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        node = spec(tmp_path, number=1, port=server.server_address[1])
        assert RankCalls(node).ask() is None
        RankCalls(node).report("node-1", 1, 1, [])
        server.shutdown()
        thread.join()
    assert RankCalls(node).ask() is None
    RankCalls(node).report("node-1", 1, 1, [])


def test_a_further_node_asks_as_itself_and_its_successor_is_another(tmp_path):
    served = Served(tmp_path / "coordinator", ranks=RankNodes(tmp_path / "ranks.json"))
    try:
        old = spec(tmp_path, number=1, port=served.port)
        new = old.model_copy(update={"generation": 1})
        assert not RankCalls(old).ask().meeting.is_over
        assert not RankCalls(new).ask().meeting.is_over
        assert RankCalls(old).ask().meeting.is_over, "it may have been frozen, and would tear the group"
        other = spec(tmp_path, number=2, port=served.port, nodes=3)
        assert not RankCalls(other).ask().meeting.is_over, "a node of another number is no successor"
    finally:
        served.close()
