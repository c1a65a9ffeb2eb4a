"""Restarts of the coordinator: a new one restores everything acknowledged from the journal in its folder."""

import errno
import itertools
import json

import pytest
from msgspec.structs import replace

from engine.config import RuntimeConfig
from engine.coordinator.open import open_coordinator
from engine.coordinator.weight_book import digest_of
from engine.events import NodeUsage, Progress
from engine.protocol.codec import decode_call, encode
from engine.protocol.exploration_order import ExplorationOrder
from engine.protocol.request import Finished, Kind, RequestId, Score, Wait, WeightsKey, Work
from engine.protocol.task import Task
from engine.storage.progress import ProgressLog
from engine.worker.transport import InprocTransport
from tests.engine.heads import finished_to_dict, reply_from_dict, request_to_list, task_to_dict, weights_to_list
from tests.engine.power import Power

V0, V1 = WeightsKey(version=0), WeightsKey(version=1)
RUNTIME = RuntimeConfig(lease_seconds=1.0, first_lease_seconds=1.0)
SEQ = itertools.count(1)
BYTES = {V0: b"weights zero", V1: b"weights one"}


class HandClock:
    """A clock that tests move by hand."""

    def __init__(self):
        self.at_ms = 0

    def now_ms(self):
        return self.at_ms

    def wall_seconds(self, duration_ms):
        return duration_ms / 1000


class Bench:
    """A coordinator on a folder with the calls of trainer and workers; `kill` drops it and opens a new one."""

    def __init__(self, folder, *, at_ms=0):
        self.folder, self.clock = folder, HandClock()
        self.clock.at_ms = at_ms
        self.open()

    def open(self):
        progress = ProgressLog(self.folder / "progress.jsonl", run="run", source="coordinator", clock=self.clock)
        self.coordinator = open_coordinator(self.folder, clock=self.clock, runtime=RUNTIME, progress=progress)
        self.transport = InprocTransport(self.coordinator)

    kill = open

    def call(self, call, blobs=None, **more):
        return self.transport.call({"call": call, **more}, blobs)

    def begin(self, *tasks, lineage=1):
        self.call("hello", lineage=lineage)
        self.publish(V0)
        for task in tasks:
            self.submit(task)

    def submit(self, task):
        self.call("submit", task=task_to_dict(task))

    def publish(self, weights):
        self.call("publish", {"weights": BYTES[weights]}, weights=weights_to_list(weights))

    def pull(self, worker="spot/0", *, weights=V0, boot=1, seq=None, **more):
        holds = [*weights_to_list(weights), digest_of(BYTES[weights])]
        seq = next(SEQ) if seq is None else seq
        who = {"worker": worker, "node": worker.split("/")[0], "boot": boot, "seq": seq}
        answer, _ = self.call("pull", holds=holds, **who, **more)
        return reply_from_dict(answer)

    def finish(self, work, worker="spot/0", *, only=None, reward=1.0):
        results, blobs = [], {}
        for attempt in work.attempts[:only]:
            name = f"t{attempt.request.batch}-{attempt.request.seed}"
            blobs[name] = f"trajectory {name} of {attempt.weights}".encode()
            score = Score(reward=reward, metrics={})
            results.append(finished_to_dict(Finished(request=attempt.request, score=score, trajectory=name)))
        answer, _ = self.call(
            "finish", blobs, worker=worker, node=worker.split("/")[0], lease=work.lease, results=results
        )
        return answer["do"]

    def commit(self, work, step, worker="spot/0"):
        named = {f"s{a.request.seed}-{step}": a.request for a in work.attempts}
        states = [[request_to_list(request), step, name] for name, request in named.items()]
        blobs = {name: f"state {name}".encode() for name in named}
        answer, _ = self.call(
            "commit", blobs, worker=worker, node=worker.split("/")[0], lease=work.lease, states=states
        )
        return answer["do"]

    def collect(self, kind=Kind.TRAIN, batch=0, have=0):
        answer, blobs = self.call("collect", kind=str(kind), batch=batch, have=have)
        return [result["request"][4] for result in answer["results"]], blobs

    def withdraw(self, *batches):
        self.call("withdraw", batches=[[str(kind), batch] for kind, batch in batches])


@pytest.fixture
def bench(tmp_path):
    return Bench(tmp_path)


def train(count=4, *, batch=0, weights=V0, shape=2, kind=Kind.TRAIN):
    requests = tuple(
        RequestId(run="run", lineage=1, batch=batch, prompt="1234", seed=seed, kind=kind) for seed in range(count)
    )
    return Task(requests=requests, weights=weights, sampler="plan", steps=8, shape=shape, dtype="float32")


def seeds(work):
    return [attempt.request.seed for attempt in work.attempts]


# --- groups

ALONE_AND_WHOLE = {"epoch": 0, "torn": [], "believed": {"1": 1.0, "2": 0.6}}


def test_a_waiting_pull_of_a_dead_worker_does_not_revive_it(bench):
    bench.begin()
    bench.pull(seq=1, group=ALONE_AND_WHOLE)
    assert bench.coordinator.groups.members.table.nodes() == {"spot"}
    bench.call("died", worker="spot/0", boot=1, reason="killed")
    assert bench.pull(seq=1, group=ALONE_AND_WHOLE) == Wait()  # the server repeats a waiting pull
    assert bench.coordinator.groups.members.table.nodes() == set()
    bench.pull(seq=2, group=ALONE_AND_WHOLE)  # the death report was wrong
    assert bench.coordinator.groups.members.table.nodes() == {"spot"}


def test_a_late_death_report_of_an_old_process_keeps_the_new_one_in_its_group(bench):
    bench.begin()
    bench.pull(boot=2, group=ALONE_AND_WHOLE)
    bench.call("died", worker="spot/0", boot=1, reason="killed")
    assert bench.coordinator.groups.members.table.nodes() == {"spot"}


# --- restarts


def test_results_are_collected_with_trajectories_in_order_of_arrival(bench):
    bench.begin(train())
    first, second = bench.pull("a/0"), bench.pull("b/0")
    bench.finish(second, "b/0")
    bench.finish(first, "a/0")
    before = bench.collect()
    assert before[0] == [2, 3, 0, 1]
    bench.kill()
    assert bench.collect() == before
    assert bench.collect(have=3)[0] == [1]


def test_only_unfinished_requests_are_leased_again_after_a_restart(bench):
    bench.begin(train())
    bench.finish(bench.pull())
    bench.kill()
    assert seeds(bench.pull()) == [2, 3]


def test_a_worker_finishes_its_image_across_a_restart(bench):
    bench.begin(train())
    work = bench.pull()
    bench.kill()
    assert bench.commit(work, 3) == "wait"
    bench.kill()
    assert seeds(bench.pull("other/0")) == [2, 3]
    assert bench.finish(work) == "wait"
    assert bench.collect()[0] == [0, 1]


def test_no_lease_number_is_issued_twice_over_many_restarts(bench):
    bench.begin(train(6))
    numbers = []
    for _ in range(3):
        numbers.append(bench.pull().lease)
        bench.kill()
    assert len(set(numbers)) == 3


def test_the_newer_holder_of_a_lease_keeps_it_after_a_restart(bench):
    bench.begin(train(2))
    old = bench.pull()
    bench.call("died", worker="spot/0", node="spot", boot=1, reason="its connection closed")
    new = bench.pull("other/0")
    bench.kill()
    assert bench.finish(old) == "fenced"
    assert bench.finish(new, "other/0") == "wait"


def test_a_restored_lease_expires_when_its_holder_is_gone(bench):
    bench.begin(train(2))
    bench.pull()
    bench.kill()
    for _ in range(4):
        bench.clock.at_ms += 400
        bench.coordinator.tick()
    assert seeds(bench.pull("other/0")) == [0, 1]


def test_an_older_process_stays_replaced_after_a_restart(bench):
    bench.begin(train(2))
    bench.pull(boot=7)
    bench.kill()
    assert bench.pull(boot=6).__class__.__name__ == "Exit"


def test_a_poisoned_request_stays_poisoned_after_a_restart(bench):
    bench.begin(train(1))
    for boot in (1, 2, 3, 4):
        bench.pull(boot=boot)
    for _ in range(2):
        assert bench.call("collect", kind="train", batch=0, have=0)[0]["poisoned"]
        bench.withdraw()  # compacts
        bench.kill()


def test_only_poisoned_requests_of_the_asked_batch_are_told(bench):
    """Early requests of the open batch and of the next one may be there together."""
    bench.begin(train(1, batch=2, kind=Kind.EARLY))
    for boot in (1, 2, 3, 4):
        bench.pull(boot=boot)
    told = [bench.call("collect", kind="early", batch=batch, have=0)[0]["poisoned"] for batch in (1, 2)]
    assert [len(texts) for texts in told] == [0, 1]


def test_early_results_stay_after_a_restart_though_the_other_images_are_made_anew(bench):
    bench.begin(train(4, kind=Kind.EARLY))
    bench.finish(bench.pull())
    bench.publish(V1)
    bench.submit(train(4, weights=V1))
    for _ in range(2):
        assert bench.collect(Kind.EARLY)[0] == [0, 1]
        assert (bench.coordinator.queue.wanted(Kind.EARLY), bench.coordinator.queue.wanted(Kind.TRAIN)) == (0, 4)
        bench.withdraw()  # compacts
        bench.kill()


def test_leases_survive_a_compaction_and_a_restart(bench):
    bench.begin(train(2, batch=0), train(2, batch=1))
    bench.finish(bench.pull())
    work = bench.pull()
    bench.withdraw((Kind.TRAIN, 0))
    bench.kill()
    assert bench.finish(work) == "wait"


def test_committed_states_are_resumed_after_a_restart(bench):
    bench.begin(train(2))
    bench.commit(bench.pull(), 5)
    bench.kill()
    work = bench.pull(boot=2)
    assert [(a.step, a.state) for a in work.attempts] == [(5, "s0-5"), (5, "s1-5")]
    _, blobs = bench.call("states", names=["s0-5", "s1-5"])
    assert blobs == {"s0-5": b"state s0-5", "s1-5": b"state s1-5"}


def test_weights_are_served_again_after_a_restart(bench):
    bench.begin(train())
    bench.kill()
    _, blobs = bench.call("weights", weights=weights_to_list(V0))
    assert blobs == {"weights": BYTES[V0]}
    assert bench.call("peek")[0] == {"do": "known", "lineage": 1, "version": 0}


def test_a_batch_finishes_exactly_once_with_a_restart_after_every_call(bench):
    bench.begin(train(6))
    bench.kill()
    for _ in range(3):
        work = bench.pull()
        bench.finish(work)
        bench.kill()
        assert bench.finish(work) == "fenced"
        bench.kill()
    assert sorted(bench.collect()[0]) == list(range(6))
    assert bench.coordinator.queue.wanted(Kind.TRAIN) == 0


def test_a_journal_with_a_truncated_last_record_loses_only_that_record(bench):
    bench.begin(train(4))
    bench.finish(bench.pull())
    bench.finish(bench.pull())
    path = bench.folder / "journal"
    path.write_bytes(path.read_bytes()[:-1])
    bench.kill()
    assert bench.collect()[0] == [0, 1]
    assert seeds(bench.pull(boot=2)) == [2, 3]


# --- fenced leases stay fenced after a restart


def test_a_result_of_replaced_weights_is_not_journaled(bench):
    """The lease stays valid for its other image; the journal must hold only results that the queue accepted."""
    bench.begin(train(2))
    old = bench.pull()
    bench.publish(V1)
    bench.submit(train(1, weights=V1))
    assert bench.finish(old) == "wait"
    assert bench.collect()[0] == [1]
    bench.kill()
    assert bench.collect()[0] == [1]
    again = bench.pull(weights=V1, boot=2)
    assert [(a.request.seed, a.weights) for a in again.attempts] == [(0, V1)]


def test_a_state_of_replaced_weights_is_not_journaled(bench):
    bench.begin(train(2))
    old = bench.pull()
    bench.publish(V1)
    bench.submit(train(1, weights=V1))
    bench.commit(old, 5)
    bench.kill()
    assert [(a.request.seed, a.step) for a in bench.pull("other/0", weights=V1).attempts] == [(0, 0)]


def test_a_lease_at_old_weights_cannot_finish_the_new_attempt_after_a_restart(bench):
    bench.begin(train(1))
    old = bench.pull()
    bench.publish(V1)
    bench.submit(train(1, weights=V1))
    bench.kill()
    assert bench.finish(old) == "fenced"
    assert bench.pull("other/0", weights=V1).attempts[0].weights == V1


def test_a_lease_whose_answer_was_lost_in_a_restart_is_issued_again(bench):
    bench.begin(train(2))
    lost = bench.pull(seq=10**9)
    bench.kill()
    again = bench.pull(seq=10**9)
    assert seeds(again) == seeds(lost)
    assert bench.finish(lost) == "fenced"
    assert bench.finish(again) == "wait"


# --- forgotten batches and weights


def test_withdrawn_batches_leave_the_journal_with_their_blobs(bench):
    bench.begin(train(2, batch=0), train(2, batch=1))
    bench.finish(bench.pull())
    bench.finish(bench.pull())
    bench.withdraw((Kind.TRAIN, 0))
    for _ in range(2):
        assert bench.collect(batch=0) == ([], {})
        assert bench.collect(batch=1)[0] == [0, 1]
        with pytest.raises(KeyError, match="t0-0"):
            bench.coordinator.journal.blob("t0-0")
        assert b"trajectory t0-0" not in (bench.folder / "journal").read_bytes()
        bench.kill()


def test_states_and_results_survive_a_compaction_and_a_restart(bench):
    bench.begin(train(2, batch=0), train(4, batch=1))
    bench.finish(bench.pull())
    first = bench.pull()
    second = bench.pull()
    bench.commit(second, 4)
    bench.finish(first)
    bench.withdraw((Kind.TRAIN, 0))
    bench.kill()
    assert bench.collect(batch=1)[0] == [0, 1]
    assert [(a.request.seed, a.step, a.state) for a in bench.pull(boot=2).attempts] == [(2, 4, "s2-4"), (3, 4, "s3-4")]


def test_weights_of_two_versions_are_kept_and_older_ones_are_deleted(bench):
    bench.begin()
    names = []
    for version in range(4):
        weights = WeightsKey(version=version)
        bench.call("publish", {"weights": b"w"}, weights=weights_to_list(weights))
        bench.withdraw((Kind.TRAIN, version))
        names.append(sorted(path.name for path in (bench.folder / "weights").iterdir()))
    assert names[-1] == ["2.safetensors", "3.safetensors"]


@pytest.mark.parametrize("dies", [False, True])
@pytest.mark.parametrize("later", [(1, 9), (2, 1)])
def test_a_late_order_of_the_trainer_is_ignored(bench, dies, later):
    """A duplicate may arrive after the trainer, or its successor, submitted the withdrawn batch again."""
    bench.begin(train())
    boot, seq = later
    bench.call("withdraw", batches=[["train", 7]], boot=boot, seq=seq)
    if dies:
        bench.kill()
    answer, _ = bench.call("withdraw", batches=[["train", 0]], boot=1, seq=8)
    assert answer == {"do": "late"}
    answer, _ = bench.call("hello", lineage=9, boot=1, seq=8)
    assert answer == {"do": "late"}
    assert seeds(bench.pull()) == [0, 1]


def test_a_call_that_a_full_disk_refused_changes_nothing(bench, monkeypatch):
    """The journal is written before the state changes. Otherwise the state could lack an entry of the journal."""
    bench.begin(train())

    def full(*_, **__):
        raise OSError(errno.ENOSPC, "no room")

    monkeypatch.setattr(bench.coordinator.journal, "append", full)
    for order in ({"call": "hello", "lineage": 2}, {"call": "withdraw", "batches": [["train", 0]]}):
        with pytest.raises(OSError, match="no room"):
            bench.coordinator.handle(decode_call(order), {})
    monkeypatch.undo()
    assert bench.coordinator.lineage == 1
    assert seeds(bench.pull()) == [0, 1]


def test_a_coordinator_on_a_new_node_reuses_no_lease_number(bench, tmp_path):
    bench.begin(train())
    old = bench.pull()
    elsewhere = Bench(tmp_path / "new", at_ms=1001)
    elsewhere.begin(train())
    assert elsewhere.pull("other/0").lease != old.lease
    assert elsewhere.finish(old) == "fenced"


def test_restored_leases_are_extended_if_the_coordinator_freezes_after_its_restart(bench):
    bench.begin(train())
    work = bench.pull()
    bench.kill()
    bench.clock.at_ms = 60_000
    bench.coordinator.tick()
    assert bench.finish(work) == "wait"


def test_a_new_lineage_begins_with_an_empty_queue(bench):
    bench.begin(train(4))
    bench.finish(bench.pull())
    work = bench.pull()
    bench.call("hello", lineage=2)
    for _ in range(2):
        assert bench.finish(work) == "fenced"
        assert bench.collect() == ([], {})
        assert bench.pull().__class__.__name__ == "Wait"
        assert bench.call("peek")[0] == {"do": "known", "lineage": 2, "version": None}
        bench.kill()


def test_the_same_lineage_keeps_its_queue(bench):
    bench.begin(train(2))
    bench.finish(bench.pull())
    bench.call("hello", lineage=1)
    assert bench.collect()[0] == [0, 1]


# --- invalid calls


@pytest.mark.parametrize(
    ("head", "why"),
    [
        ({"call": "dance"}, "does not know the call 'dance'"),
        ({"call": "submit", "task": {"requests": []}}, r"'submit' cannot be read: .*\$\.task"),
        (
            {"call": "finish", "worker": "spot/0", "node": "spot", "lease": 0, "results": [{}]},
            r"'finish' cannot be read: .*`request` - at `\$\.results\[0\]`",
        ),
        (
            {"call": "commit", "worker": "spot/0", "node": "spot", "lease": 0, "states": [[1]]},
            r"'commit' cannot be read: .*\$\.states\[0\]",
        ),
    ],
    ids=["dance", "submit", "finish", "commit"],
)
def test_an_unreadable_call_is_refused_and_not_journaled(bench, head, why):
    bench.begin(train(2))
    work = bench.pull()
    if "lease" in head:
        head = {**head, "lease": work.lease}
    with pytest.raises(ValueError, match=why):
        bench.call(**head)
    bench.kill()
    assert seeds(bench.pull(boot=2)) == [0, 1]


def test_a_result_without_its_trajectory_is_refused(bench):
    bench.begin(train(2))
    work = bench.pull()
    result = Finished(request=work.attempts[0].request, score=Score(reward=0.0, metrics={}), trajectory="t")
    with pytest.raises(KeyError, match=r"^'t'$"):
        bench.call("finish", worker="spot/0", node="spot", lease=work.lease, results=[finished_to_dict(result)])
    assert bench.collect() == ([], {})
    bench.kill()
    assert seeds(bench.pull(boot=2)) == [0, 1]


def test_a_non_finite_reward_survives_a_restart(bench):
    bench.begin(train(2))
    bench.finish(bench.pull(), reward=float("nan"))
    bench.kill()
    answer, _ = bench.call("collect", kind="train", batch=0, have=0)
    assert [result["reward"] for result in answer["results"]] == [None, None]


# --- exploration


EXPLORE = ExplorationOrder(
    run="run",
    run_seed=0,
    lineage=1,
    batch=1,
    prompts=("1234", "5678"),
    keep=2,
    most=8,
    policy="bayes",
    chunk=2,
    counted=12,
    version=0,
    sampler="plan",
    steps=8,
    shape=2,
    dtype="float32",
    scorer="reward",
)


def explored(bench, *, deaths):
    """Return all candidates of a batch in the order of their leases. `deaths`: restart after every call."""
    bench.begin()
    bench.call("explore", order=encode(EXPLORE))
    made = []
    while bench.call("collect", kind="explore", batch=1, have=0)[0]["to_come"]:
        if deaths:
            bench.kill()
        work = bench.pull()
        if deaths:
            bench.kill()
        made += [attempt.request for attempt in work.attempts]
        results = [
            finished_to_dict(Finished(request=r, score=Score(reward=r.seed % 7, metrics={}), trajectory=None))
            for r in made[-len(work.attempts) :]
        ]
        bench.call("finish", worker="spot/0", node="spot", lease=work.lease, results=results)
    return made


def test_a_counted_budget_gives_the_same_candidates_with_restarts_after_every_call(tmp_path):
    made = explored(Bench(tmp_path / "calm"), deaths=False)
    assert len(set(made)) == len(made) == 12
    assert explored(Bench(tmp_path / "deadly"), deaths=True) == made


def test_candidates_refused_by_a_full_disk_are_leased_once_space_is_free(bench, monkeypatch):
    bench.begin()
    call = decode_call({"call": "explore", "order": encode(EXPLORE)})
    append, refused = bench.coordinator.journal.append, []

    def full_at_the_first_task(record, *more, **named):
        if record["op"] == "submit" and not refused:
            refused.append(record)
            raise OSError(errno.ENOSPC, "no room")
        append(record, *more, **named)

    monkeypatch.setattr(bench.coordinator.journal, "append", full_at_the_first_task)
    with pytest.raises(OSError, match="no room"):
        bench.coordinator.handle(call, {})
    made = []
    while bench.call("collect", kind="explore", batch=1, have=0)[0]["to_come"]:
        work = bench.pull()
        made += work.attempts
        results = [
            finished_to_dict(Finished(request=a.request, score=Score(reward=0.0, metrics={}), trajectory=None))
            for a in work.attempts
        ]
        bench.call("finish", worker="spot/0", node="spot", lease=work.lease, results=results)
    assert refused
    assert len(made) == EXPLORE.counted


def test_no_candidate_is_leased_while_rollouts_wait(bench):
    bench.begin(train(4))
    bench.call("explore", order=encode(EXPLORE))
    kinds = [bench.pull(f"{number}/0").attempts[0].request.kind for number in range(3)]
    assert kinds == [Kind.TRAIN, Kind.TRAIN, Kind.EXPLORE]


def test_with_a_complete_pool_workers_wait_for_the_early_rollouts_even_after_a_restart(bench):
    def pull(worker):
        bench.pull(worker)  # a worker's first call shows that its node lives
        return bench.pull(worker)

    bench.begin()
    bench.call("explore", order=encode(replace(EXPLORE, counted=None, most=64, pool=1)))
    candidates = pull("a/0")
    assert len(candidates.attempts) == 2
    results = [
        finished_to_dict(Finished(request=a.request, score=Score(reward=0.0, metrics={}), trajectory=None))
        for a in candidates.attempts
    ]
    assert pull("b/0") == Wait(), "the pool is under way"
    bench.call("finish", worker="a/0", node="a", lease=candidates.lease, results=results)
    for _ in range(2):
        assert pull("b/0") == Wait()
        bench.kill()
    bench.call("explore", order=encode(replace(EXPLORE, counted=None, most=64)))
    assert pull("b/0") == Wait(), "the same order of a restarted trainer"
    early = RequestId(run="run", lineage=1, batch=1, prompt="1234", seed=9, kind=Kind.EARLY)
    bench.submit(replace(train(1), requests=(early,)))
    bench.kill()
    assert bench.pull("b/0").attempts[0].request.kind is Kind.EARLY
    assert pull("c/0").attempts[0].request.kind is Kind.EXPLORE


def test_a_repeated_exploration_order_is_ignored_and_a_withdrawn_one_ends(bench):
    bench.begin()
    bench.call("explore", order=encode(EXPLORE))
    first = bench.pull()
    bench.call("explore", order=encode(EXPLORE))
    assert not {a.request for a in bench.pull("b/0").attempts} & {a.request for a in first.attempts}
    bench.withdraw((Kind.EXPLORE, 1))
    for _ in range(2):
        assert bench.pull("c/0") == Wait()
        bench.kill()


def test_the_idle_time_budget_learns_from_earlier_training_phases(bench):
    bench.begin(train(2))
    bench.call("explore", order=encode(replace(EXPLORE, counted=None, most=64)))
    bench.finish(bench.pull())
    dealt = 0
    while isinstance(work := bench.pull(of=1, usage=[["exploration", 0.0, 500.0 * min(dealt, 2)]]), Work):
        dealt += len(work.attempts)
        bench.clock.at_ms += 100
        results = [
            finished_to_dict(Finished(request=a.request, score=Score(reward=0.0, metrics={}), trajectory=None))
            for a in work.attempts
        ]
        bench.call("finish", worker="spot/0", node="spot", lease=work.lease, results=results)
        if dealt >= 40:
            break
    assert dealt >= 40  # no training phase was measured yet: exploration continues until new weights come
    bench.clock.at_ms += 10_000
    bench.publish(V1)
    assert bench.coordinator.exploration.phase_seconds == [pytest.approx(12.0, abs=1.0)]


def test_a_slow_first_pass_does_not_turn_exploration_off(bench):
    """A GPU's first pass can take longer than a whole training phase. Later passes show the true time."""
    bench.begin()
    usage, dealt = [["exploration", 0.0, 20_000.0]], []
    for batch in range(12):
        bench.call("explore", order=encode(replace(EXPLORE, counted=None, most=64, batch=batch + 1)))
        bench.submit(train(1, batch=batch))
        bench.finish(bench.pull())
        dealt.append(0)
        trained_ms = bench.clock.at_ms + 1_000
        while bench.clock.at_ms < trained_ms and isinstance(work := bench.pull(of=1, usage=usage), Work):
            dealt[-1] += len(work.attempts)
            bench.clock.at_ms += 100
            usage = [["exploration", 0.0, 100.0]]
            results = [
                finished_to_dict(Finished(request=a.request, score=Score(reward=0.0, metrics={}), trajectory=None))
                for a in work.attempts
            ]
            bench.call("finish", worker="spot/0", node="spot", lease=work.lease, results=results)
        bench.clock.at_ms = max(bench.clock.at_ms, trained_ms)
        bench.coordinator.exploration.end_training_phase(bench.clock.at_ms)
    assert min(dealt) > 0, dealt
    assert dealt[-1] > dealt[1], dealt


# --- events for the launcher


def usage_events(bench):
    lines = (bench.folder / "progress.jsonl").read_text().splitlines()
    return [event for event in (Progress.from_json(line).event for line in lines) if isinstance(event, NodeUsage)]


def test_usage_is_counted_once_and_divided_by_the_workers_of_the_node(bench):
    bench.begin()
    for worker in ("spot/0", "spot/1"):
        bench.clock.at_ms += 400
        now_ms = bench.clock.at_ms
        spans = [["rollout", now_ms - 300.5, now_ms - 0.5], ["sync", now_ms - 0.5, now_ms]]
        bench.pull(worker, of=2, usage=spans)
    for _ in range(3):
        bench.clock.at_ms += 1000
        bench.coordinator.tick()
    events = usage_events(bench)
    assert sum(event.phase_ms.get("rollout", 0) for event in events) == 300
    assert [event.phase_ms for event in events] == [{"rollout": 300}]
    assert (events[0].from_ms, events[0].to_ms) == (100, 1800)
    rollouts = [tuple(span) for span in events[0].spans if span[1] == "rollout"]
    assert rollouts == [("spot/0", "rollout", 100, 400), ("spot/1", "rollout", 500, 800)]


def test_usage_adds_up_fractions_of_a_millisecond(bench):
    bench.begin()
    for _ in range(10):
        bench.clock.at_ms += 1000
        bench.pull(of=1, usage=[["sync", bench.clock.at_ms - 0.5, bench.clock.at_ms]])
    assert sum(event.phase_ms["sync"] for event in usage_events(bench)) == 5


def test_a_silent_worker_is_reported_to_the_launcher(bench):
    bench.begin(train(2))
    bench.pull()
    for _ in range(4):
        bench.clock.at_ms += 400
        bench.coordinator.tick()
    kinds = [json.loads(line)["kind"] for line in (bench.folder / "progress.jsonl").read_text().splitlines()]
    assert kinds == ["node_seen", "node_missed"]


def test_published_weights_survive_a_power_cut(tmp_path, monkeypatch):
    power = Power(monkeypatch)
    bench = Bench(tmp_path / "here")
    bench.begin(train())
    bench.publish(V1)
    after = Bench(power.cut(tmp_path / "here", tmp_path / "after"))
    assert after.coordinator.queue.live == V1
    assert after.call("weights", weights=weights_to_list(V1))[1] == {"weights": BYTES[V1]}


def test_no_lease_number_is_issued_twice_after_a_power_cut_at_start(tmp_path, monkeypatch):
    """The clock cannot tell the two starts apart, because it was set back in between."""
    power = Power(monkeypatch)
    first = Bench(tmp_path / "here", at_ms=5_000_000)
    given = first.coordinator.state.first_lease
    after = Bench(power.cut(tmp_path / "here", tmp_path / "after"), at_ms=0)
    assert after.coordinator.state.first_lease > given
