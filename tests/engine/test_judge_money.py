"""The budget of paid judges: no call without money, whatever is restarted, lost, repeated or killed."""

import errno
import itertools
import math
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import stamina

from engine.clock import ScaledClock
from engine.config import EngineConfig, RewardConfig, RuntimeConfig
from engine.coordinator.judge_account import JudgeAccount
from engine.coordinator.judge_desk import JudgeDesk
from engine.coordinator.open import open_coordinator
from engine.events import Capacity, Judged, Market, NodeCapacity, NodeState, Progress
from engine.prompt_set import NO_METADATA
from engine.protocol.messages import BeginLineage, NodeLost, PaidCall, Withdraw, WorkerDied
from engine.protocol.records import JudgeBilled
from engine.reward_config import VlmConfig
from engine.rewards.load import load_reward, load_reward_of_job
from engine.rewards.purse import BudgetUsedUp, Payment
from engine.rewards.reward import RewardError
from engine.rewards.vlm import VlmReward
from engine.storage import disk
from engine.storage.checkpoint import CheckpointStore
from engine.storage.judge_fund import OBJECT, JudgeFund
from engine.storage.progress import ProgressLog
from engine.worker import coordinator_purse
from engine.worker.coordinator_purse import CoordinatorPurse
from engine.worker.transport import InprocTransport, ask
from tests.engine.judge_server import JudgeServer
from tests.engine.test_http_reward import grey
from tests.engine.test_loop import TINY, build

pytestmark = pytest.mark.usefixtures("one_layer")


@pytest.fixture(autouse=True)
def no_pauses():
    with stamina.set_testing(True, attempts=3, cap=True):
        yield


class Bank:
    """A coordinator with a budget, which can be killed, and lose its machine."""

    def __init__(self, folder, limit):
        self.folder, self.limit = folder, limit
        self.clock = ScaledClock(origin_ms=time.time_ns() // 1_000_000)
        self.boots = itertools.count(1)
        self.restart()

    def restart(self):
        log = self.folder / "progress.jsonl"
        self.coordinator = open_coordinator(
            self.folder / "machine",
            clock=self.clock,
            runtime=RuntimeConfig(),
            progress=ProgressLog(log, run="run", source="coordinator", clock=self.clock),
            fund=JudgeFund(f"file://{self.folder}/store", self.limit),
        )

    def lose_the_machine(self):
        shutil.rmtree(self.folder / "machine")
        self.restart()

    def call(self, *arguments, **fields):
        return InprocTransport(self.coordinator).call(*arguments, **fields)

    def purse(self, worker="spot-0/0"):
        return CoordinatorPurse(self, worker=worker, node=worker.partition("/")[0], boot=next(self.boots))

    def died(self, worker):
        ask(self, WorkerDied(worker=worker, boot=10**9, reason="SIGKILL"))

    @property
    def reported(self):
        lines = (self.folder / "progress.jsonl").read_text().splitlines()
        events = [Progress.from_json(line).event for line in lines]
        return sum(event.micro_usd for event in events if isinstance(event, Judged))


def until_used_up(do):
    """Repeat until the budget is used up."""
    try:
        for _ in range(10_000):
            do()
    except BudgetUsedUp:
        return
    raise AssertionError("the budget is never used up")


def paid(micro_usd):
    return PaidCall(input_tokens=1, output_tokens=1, micro_usd=micro_usd)


def test_money_is_held_before_and_billed_after_and_the_rest_is_free_again(tmp_path):
    bank = Bank(tmp_path, 100)
    purse = bank.purse()
    first = purse.hold(60, wait=True)
    assert bank.purse("spot-1/0").hold(60, wait=False) is None, "the first holds the money"
    purse.bill(first, [paid(10), paid(20)])
    second = purse.hold(70, wait=False)
    assert second is not None
    purse.bill(second, [paid(70)])
    with pytest.raises(BudgetUsedUp, match=r"the judges' money is used up: the next calls may cost \$0.0000"):
        purse.hold(1, wait=True)
    assert bank.reported == 100
    assert bank.coordinator.queue.stop_reason is not None, "the run stops"


def test_a_repeated_hold_and_a_repeated_bill_count_once(tmp_path):
    bank = Bank(tmp_path, 100)
    sent, again = [], InprocTransport(bank.coordinator)

    class Twice:
        def call(self, head, blobs=None, *, wait=False):
            sent.append(head)
            again.call(head, blobs)
            return again.call(head, blobs)

    purse = CoordinatorPurse(Twice(), worker="spot-0/0", node="spot-0", boot=1)
    purse.bill(purse.hold(40, wait=True), [paid(30)])
    assert (bank.coordinator.state.judges.spent, bank.coordinator.state.judges.holds) == (30, {})
    again.call(sent[0])
    assert bank.coordinator.state.judges.holds == {}, "a late repetition of a billed hold holds nothing"
    assert bank.reported == 30


def test_the_account_survives_a_restart_and_a_compaction(tmp_path):
    bank = Bank(tmp_path, 1000)
    purse = bank.purse()
    purse.bill(purse.hold(300, wait=True), [paid(250)])
    purse.hold(100, wait=True)
    for _ in range(2):
        bank.coordinator.log.compact()
        bank.restart()
        account = bank.coordinator.state.judges
        assert (account.spent, list(account.holds.values())) == (250, [100])
    assert bank.purse("spot-1/0").hold(651, wait=False) is None
    assert bank.purse("spot-1/0").hold(650, wait=False) is not None


def test_the_spend_of_several_workers_counts_once_after_a_compaction(tmp_path):
    bank = Bank(tmp_path, 1000)
    for worker in ("spot-0/0", "spot-1/0"):
        purse = bank.purse(worker)
        purse.bill(purse.hold(300, wait=True), [paid(200)])
    for _ in range(2):
        bank.coordinator.log.compact()
        bank.restart()
        assert bank.coordinator.state.judges.spent == 400
    assert bank.purse("spot-2/0").hold(600, wait=False) is not None
    assert bank.purse("spot-3/0").hold(1, wait=False) is None


def test_money_of_a_dead_worker_and_of_its_earlier_processes_is_spent(tmp_path):
    bank = Bank(tmp_path, 100)
    bank.purse().hold(30, wait=True)
    bank.died("spot-0/0")
    assert bank.coordinator.state.judges.spent == 30
    frozen = bank.purse()
    number = frozen.hold(20, wait=True)
    bank.purse().hold(40, wait=True)
    frozen.bill(number, [paid(1)])
    assert bank.coordinator.state.judges.spent == 50, "the bill of a hold that counts as spent changes nothing"
    assert bank.reported == 50


def test_a_late_bill_of_an_earlier_process_leaves_the_newer_holds_known():
    account = JudgeAccount()
    for boot, seq in ((2, 1), (1, 5)):
        account.apply(JudgeBilled(worker="spot-0/0", boot=boot, seq=seq, micro_usd=1))
    assert account.is_known(("spot-0/0", 2, 1)), "a repeated hold would hold money that nobody bills"
    assert not account.is_known(("spot-0/0", 2, 2))
    assert not account.is_known(("spot-1/0", 1, 1))


def test_a_run_that_stops_gives_no_money(tmp_path):
    bank = Bank(tmp_path, 100)
    bank.coordinator.queue.stop("asked for by a person")
    with pytest.raises(BudgetUsedUp, match="asked for by a person"):
        bank.purse().hold(1, wait=False)
    assert bank.coordinator.state.judges.funded == 0


def test_a_lost_machine_loses_a_part_and_never_frees_money(tmp_path):
    bank = Bank(tmp_path, 1000)
    purse = bank.purse()
    for _ in range(3):
        purse.bill(purse.hold(15, wait=True), [paid(15)])
    bank.lose_the_machine()
    assert bank.coordinator.state.judges.funded == 0
    purse, spent = bank.purse(), []

    def spend():
        purse.bill(purse.hold(20, wait=True), [paid(20)])
        spent.append(20)

    until_used_up(spend)
    assert 1000 - 45 - 20 <= sum(spent) <= 1000 - 45


def test_an_unreadable_object_in_the_store_leaves_no_money(tmp_path):
    bank = Bank(tmp_path, 1000)
    CheckpointStore(f"file://{tmp_path}/store").put(OBJECT, b"{")
    with pytest.raises(BudgetUsedUp):
        bank.purse().hold(1, wait=True)


def walk(folder, seed, limit=5_000):
    """Spend at random amid kills, restarts and losses. Return what was really spent when the budget is used up."""
    draw = random.Random(seed)
    bank = Bank(folder / str(seed), limit)
    names = [f"spot-{number}/0" for number in range(3)]
    purses, held, really = {name: bank.purse(name) for name in names}, {}, []

    def step():
        name, chance = draw.choice(names), draw.random()
        if name in held and chance < 0.7:
            hold, price = held.pop(name)
            purses[name].bill(hold, [paid(price)])
        elif name not in held and (hold := purses[name].hold(50, wait=False)) is not None:
            price = draw.randint(1, 50)
            held[name] = (hold, price)
            really.append(price)  # the calls are made now, whatever happens to their bill
            assert sum(really) <= limit
        if 0.9 < chance < 0.93:  # the process restarts, and its machine reports nothing
            held.pop(name, None)
            purses[name] = bank.purse(name)
        if 0.93 < chance < 0.94 and held.pop(name, None):
            bank.died(name)
            purses[name] = bank.purse(name)
        if chance > 0.95:
            bank.restart()
        if chance > 0.997:
            bank.lose_the_machine()

    until_used_up(step)
    return sum(really)


@pytest.mark.parametrize("seed", range(6))
def test_no_order_of_kills_restarts_and_losses_spends_more_than_the_budget(tmp_path, seed):
    assert walk(tmp_path, seed) > 2_500


def test_a_planted_bug_that_frees_held_money_is_found(tmp_path, monkeypatch):
    monkeypatch.setattr(JudgeDesk, "died", lambda self, worker, boot, now_ms: self._log.state.judges.holds.clear())
    with pytest.raises(AssertionError, match="sum"):
        [walk(tmp_path, seed) for seed in range(20)]


# --- money that nobody would give back -----------------------------------------------------------------------


def lost(*names):
    nodes = [NodeCapacity(node=name, market=Market.SPOT, state=NodeState.LOST, workers=1) for name in names]
    return Capacity(generation=1, nodes=tuple(nodes))


def test_a_late_word_of_an_old_process_leaves_the_money_of_the_next_held(tmp_path):
    bank = Bank(tmp_path, 100)
    first, second = bank.purse(), bank.purse()
    first.hold(30, wait=True)
    second.hold(20, wait=True)
    ask(bank, WorkerDied(worker="spot-0/0", boot=1, reason="SIGKILL"))
    account = bank.coordinator.state.judges
    assert (account.spent, list(account.holds.values())) == (30, [20])


@pytest.mark.parametrize("by", ["the launcher", "Ray"])
def test_money_on_a_lost_node_is_spent_and_nobody_waits_for_it(tmp_path, by):
    """A node that vanishes closes no connection, so no worker of the node is reported dead."""
    bank = Bank(tmp_path, 100)
    bank.purse("run-spot-0-g1/0").hold(60, wait=True)
    bank.purse("run-spot-0-g10/0").hold(10, wait=True)
    if by == "Ray":
        ask(bank, NodeLost(node="run-spot-0-g1", reason="Ray lost its node"))
    else:
        bank.coordinator.set_capacity(lost("run-spot-0-g1"))
    assert list(bank.coordinator.state.judges.holds.values()) == [10], "another node's money stays held"
    with pytest.raises(BudgetUsedUp):
        bank.purse("run-spot-0-g2/0").hold(60, wait=False)
    assert bank.reported == 60
    assert bank.coordinator.queue.stop_reason is not None, "the run stops, and its nodes cost nothing more"


def test_money_of_a_killed_trainer_is_spent_once_the_next_trainer_gives_an_order(tmp_path):
    """A trainer holds no connection that tells of its death, and may never score again."""
    bank = Bank(tmp_path, 100)
    first, second = bank.purse("run-trainer-g0/trainer"), bank.purse("run-trainer-g0/trainer")
    first.hold(60, wait=True)
    for _ in range(2):
        ask(bank, BeginLineage(node="run-trainer-g0", lineage=1, boot=10**9, seq=1))
        assert bank.reported == 60
    assert second.hold(40, wait=False) is not None
    ask(bank, Withdraw(node="run-trainer-g0", batches=(), boot=10**9, seq=2))
    assert list(bank.coordinator.state.judges.holds.values()) == [40], "the present trainer's money stays held"


def test_a_hold_that_waits_lets_the_other_payments_of_its_process_end(tmp_path, monkeypatch):
    """A server scores several leases of a worker at once, so one payment may need another's money to end."""
    bank = Bank(tmp_path, 100)
    purse = bank.purse()
    payment, asked = Payment(purse, 60, 1), itertools.count()
    call = bank.call

    def count(*arguments, **fields):
        assert next(asked) < 100, "it asks for ever"
        return call(*arguments, **fields)

    def pause(seconds):
        assert payment.take()
        payment.made(paid(50))  # an answer without a score
        assert not payment.take(), "no other try: the money is held"
        payment.__exit__(None, None, None)

    bank.call = count
    monkeypatch.setattr(coordinator_purse.time, "sleep", lambda seconds: on_a_thread(pause, seconds))
    with Payment(purse, 45, 1) as second:
        assert second.take()
        second.made(paid(45))
    assert bank.reported == 95


def on_a_thread(do, *arguments):
    with ThreadPoolExecutor(1) as threads:
        threads.submit(do, *arguments).result(timeout=10)


def test_tries_after_a_lost_connection_are_paid_although_the_first_hold_counts_as_spent(tmp_path):
    bank = Bank(tmp_path, 1000)
    with Payment(bank.purse(), 100, 2) as payment:
        for _ in range(2):
            assert payment.take()
            payment.made(paid(100))
        bank.died("spot-0/0")  # its connection closed, and it is alive
        assert payment.take()
        payment.made(paid(70))
    assert bank.reported == 270
    assert not bank.coordinator.state.judges.holds


@pytest.mark.parametrize("seed", range(20))
def test_a_payment_of_several_holds_bills_each_call_once_and_no_hold_early(seed):
    draw, billed = random.Random(seed), []

    class Known:
        def __init__(self):
            self.numbers, self.held = itertools.count(1), {}

        def hold(self, micro_usd, *, wait):
            number = next(self.numbers)
            self.held[number] = micro_usd
            return number

        def bill(self, hold, calls):
            del self.held[hold]
            billed.extend(call.micro_usd for call in calls)
            assert sum(self.held.values()) + sum(billed) >= made, "money of a call that was made is free"

    purse, made = Known(), 0
    with Payment(purse, 100, 3) as payment:
        for _ in range(12):
            assert payment.take()
            price = draw.randint(1, 100)
            payment.made(paid(price))
            made += price
    assert sum(billed) == made
    assert len(billed) == 12


def test_a_full_disk_of_the_coordinator_neither_takes_nor_reports_money_again(tmp_path, monkeypatch):
    """The store may have room: on clouds the budget is in a bucket."""
    monkeypatch.setattr(disk, "ASK_AGAIN_SECONDS", 0.0)
    bank = Bank(tmp_path, 1000)
    journal, purse = bank.coordinator.journal, bank.purse()
    append, times = journal.append, itertools.count()

    def full(*arguments, **fields):
        if next(times) < 5:
            raise OSError(errno.ENOSPC, "no space left on device")
        return append(*arguments, **fields)

    monkeypatch.setattr(journal, "append", full)
    first = purse.hold(10, wait=True)
    assert bank.coordinator.state.judges.funded == 20, "one part of the budget"
    times = itertools.count()
    purse.bill(first, [paid(10)])
    assert bank.reported == 10
    second = purse.hold(980, wait=True)
    purse.bill(second, [paid(980)])
    assert bank.reported == 990


# --- with a judge ------------------------------------------------------------------------------------------


def judge(server, **fields):
    prices = {"usd_per_million_input": 5.0, "usd_per_million_output": 10.0, "most_input_tokens": 1000}
    # 1000 tokens for 5 dollars and 512 for 10 dollars a million: 10120 micro-dollars at most, 5500 as answered
    return VlmConfig(**{"url": server.url, "model": "m", "concurrency": 1, "max_usd": 1.0, **prices, **fields})


def test_calls_cost_what_the_server_counted_and_unknown_calls_the_most(tmp_path):
    bank = Bank(tmp_path, 1_000_000)
    with JudgeServer([None, 429, 503, "garbage", "dies", None]) as server:
        scores = VlmReward(judge(server), bank.purse()).score(grey(2), ["a"] * 2, [NO_METADATA] * 2)
    assert [math.isnan(score.reward) for score in scores] == [False, True]
    # image 1: 5500; image 2: 429 and 503 are free, garbage has no tokens. Its three tries are over.
    assert bank.reported == 5500 + 10120
    with JudgeServer(["dies", None]) as server:
        VlmReward(judge(server), bank.purse()).score(grey(1), ["a"], [NO_METADATA])
    assert bank.reported == 5500 + 10120 + 10120 + 5500
    with JudgeServer(usage=None) as server:
        VlmReward(judge(server), bank.purse()).score(grey(1), ["a"], [NO_METADATA])
    assert bank.reported == 5500 + 10120 + 10120 + 5500 + 10120
    assert not bank.coordinator.state.judges.holds


@pytest.mark.parametrize("status", [502, 504, 520, 524])
def test_a_call_that_a_gateway_gave_up_on_costs_the_most(tmp_path, status):
    """The server behind the gateway may have answered, and charges for the answer."""
    bank = Bank(tmp_path, 1_000_000)
    with JudgeServer([status, None]) as server:
        assert not math.isnan(VlmReward(judge(server), bank.purse()).score(grey(1), ["a"], [NO_METADATA])[0].reward)
    assert bank.reported == 10120 + 5500


def test_an_answer_that_does_not_count_its_own_tokens_costs_the_most(tmp_path):
    bank = Bank(tmp_path, 1_000_000)
    with JudgeServer(usage={"prompt_tokens": 1000}) as server:
        VlmReward(judge(server), bank.purse()).score(grey(1), ["a"], [NO_METADATA])
    assert bank.reported == 10120


def test_a_refused_call_is_free_and_leaves_no_money_held(tmp_path):
    bank = Bank(tmp_path, 1_000_000)
    with JudgeServer([401]) as server, pytest.raises(RewardError, match="refused"):
        VlmReward(judge(server), bank.purse()).score(grey(1), ["a"], [NO_METADATA])
    assert (bank.reported, bank.coordinator.state.judges.holds) == (0, {})


def test_no_call_is_made_after_the_budget_is_used_up_and_none_after_a_restart(tmp_path):
    bank = Bank(tmp_path, 60_000)
    with JudgeServer() as server:
        reward = VlmReward(judge(server), bank.purse())
        until_used_up(lambda: reward.score(grey(2), ["a"] * 2, [NO_METADATA] * 2))
        made = len(server.sizes)
        assert 5500 * made <= 60_000 < 5500 * made + 2 * 10120
        for restart in (lambda: None, bank.restart, bank.lose_the_machine):
            restart()
            with pytest.raises(BudgetUsedUp):
                VlmReward(judge(server), bank.purse()).score(grey(2), ["a"] * 2, [NO_METADATA] * 2)
        assert len(server.sizes) == made
    assert bank.reported == 5500 * made


def test_a_retry_without_money_leaves_the_image_unscored_while_others_hold_it(tmp_path, capsys):
    bank = Bank(tmp_path, 25_000)
    assert bank.purse("spot-1/0").hold(10_000, wait=True)
    with JudgeServer(["dies", None]) as server:
        score = VlmReward(judge(server), bank.purse()).score(grey(1), ["a"], [NO_METADATA])[0]
        assert (math.isnan(score.reward), len(server.sizes)) == (True, 1)
    assert "no money of the judges' budget is left for another try" in capsys.readouterr().out


def test_a_frozen_judge_costs_the_most_of_each_try_and_no_more(tmp_path):
    bank = Bank(tmp_path, 1_000_000)
    command = [sys.executable, "-m", "tests.engine.judge_server"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            frozen = VlmConfig(**{**judge(Address(process.stdout.readline().strip())).model_dump(), "tries": 3})
            os.kill(process.pid, signal.SIGSTOP)
            reward = VlmReward(frozen.model_copy(update={"timeout_seconds": 0.2}), bank.purse())
            assert math.isnan(reward.score(grey(1), ["a"], [NO_METADATA])[0].reward)
        finally:
            os.kill(process.pid, signal.SIGCONT)
            process.kill()
    assert bank.reported == 3 * 10120


class Address:
    def __init__(self, url):
        self.url = url


def test_money_is_billed_even_if_scoring_fails(tmp_path):
    bank = Bank(tmp_path, 1000)

    def fail():
        with Payment(bank.purse(), 100, 2) as payment:
            assert payment.take()
            payment.made(paid(70))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert (bank.reported, bank.coordinator.state.judges.holds) == (70, {})


def test_a_run_stops_when_its_judges_have_no_money_and_goes_on_with_more(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("JUDGE_KEY", "sk-planted")
    with JudgeServer() as server:
        reward = RewardConfig(name="vlm", vlm=judge(server, max_usd=0.15, key="JUDGE_KEY"))
        job, made, iterations = TINY.model_copy(update={"reward": reward, "iterations": 40}), [], []
        for limit, is_new_machine in ((None, False), (None, False), (300_000, False), (300_000, True)):
            if is_new_machine:
                shutil.rmtree(tmp_path / "coordinator")
            late = Late()
            run = build(job, tmp_path, reward=load_reward(reward, None, purse=late), judges=limit)
            late.purse = CoordinatorPurse(InprocTransport(run.coordinator), worker="trainer/trainer", node="trainer")
            finished = run.loop.run()
            assert finished.reason == "stopped"
            assert finished.text.startswith("budget: the judges' money is used up: the next calls may cost")
            assert finished.text.endswith(f"less is left of ${(limit or 150_000) / 1e6:.2f}")
            made.append(len(server.sizes))
            iterations.append(finished.iteration)
    assert made[0] == made[1], "a run that starts again makes no call"
    assert 10 < made[0] <= 150_000 / 5500
    assert made[0] + 10 < made[2] <= 300_000 / 5500, "the money spent before counts"
    assert iterations[0] < iterations[2], "the run continues from its checkpoint"
    assert made[2] == made[3], "a new machine finds in the store that the larger budget is taken too"
    lines = (tmp_path / "progress" / "coordinator.jsonl").read_text().splitlines()
    events = [Progress.from_json(line).event for line in lines]
    calls = [call for event in events if isinstance(event, Judged) for call in event.calls]
    assert set(calls) == {(1000, 50, 5500)}
    assert len(calls) == made[3]
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and b"sk-planted" in path.read_bytes()]
    assert "sk-planted" not in f"{capsys.readouterr()}"


class Late:
    """A purse that is known after the run is built."""

    def hold(self, micro_usd, *, wait):
        return self.purse.hold(micro_usd, wait=wait)

    def bill(self, hold, calls):
        self.purse.bill(hold, calls)


def test_the_check_before_a_launch_asks_a_paid_judge_nothing_that_costs(tmp_path):
    with JudgeServer() as server:
        job = EngineConfig(reward=RewardConfig(name="vlm", vlm=judge(server)))
        scores = load_reward_of_job(job, None, must_answer=True)(grey(2), ["a", "b"])
        assert [score.reward for score in scores] == [0.0, 0.0]
        assert (server.sizes, server.listed) == ([], 1)
        with pytest.raises(RewardError, match="here nothing pays"):
            load_reward_of_job(job, None)
    with pytest.raises(RewardError, match="the model's server does not answer"):
        load_reward_of_job(job, None, must_answer=True)(grey(1), ["a"])


def test_prices_and_budget_belong_together():
    with JudgeServer() as server:
        with pytest.raises(ValueError, match="a judge with a price needs max_usd, and a free judge has none"):
            judge(server, max_usd=None)
        with pytest.raises(ValueError, match="a judge with a price needs max_usd, and a free judge has none"):
            VlmConfig(url=server.url, model="m", max_usd=1.0)
        with pytest.raises(ValueError, match=r"max_usd is \$0.01, and one call may cost \$0.01012"):
            judge(server, max_usd=0.01)
        parts = [{"name": "vlm", "label": label, "vlm": judge(server)} for label in ("a", "b")]
    assert RewardConfig(name="sum", parts=[*parts, {"name": "ocr"}]).judge_micro_usd == 2_000_000
