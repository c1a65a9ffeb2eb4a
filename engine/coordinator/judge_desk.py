"""Give out the money of the judges' budget: hold before the calls, bill after them, stop the run when it is used up.

Each step is in the journal before its answer leaves, so a restarted coordinator knows what is spent and held.
"""

from collections.abc import Callable, Sequence

from engine.coordinator.judge_account import Hold
from engine.coordinator.run_log import RunLog
from engine.events import JUDGES_USED_UP, Judged
from engine.parallel.worker_group import node_of
from engine.protocol.messages import BillJudge, Done, Held, HoldMoney, NoMoney
from engine.protocol.records import JudgeBilled, JudgesFunded, MoneyHeld
from engine.protocol.request import Wait
from engine.storage.judge_fund import JudgeFund


class JudgeDesk:
    """Handler of calls about money. `fund`: None if the job has no paid judge. `report`: writes progress."""

    def __init__(self, log: RunLog, fund: JudgeFund | None, report: Callable[[Judged], None]) -> None:
        self._log, self._fund, self._report = log, fund, report
        self._taken = 0
        """Money taken from the fund and not in the journal yet, because the disk is full."""
        self._reported: set[Hold] = set()
        """Holds whose spending is reported, and is not in the journal yet, because the disk is full."""

    def hold(self, call: HoldMoney, now_ms: int) -> Held | NoMoney | Wait:
        """Hold money, or let the caller wait for money that others hold. Raises OSError if disk or store is full."""
        account, key = self._log.state.judges, (call.worker, call.boot, call.seq)
        if account.is_known(key):
            return Held()
        self.died(call.worker, call.boot - 1, now_ms)
        if self._fund is None or self._log.state.queue.stop_reason is not None:
            return NoMoney(text=self._log.state.queue.stop_reason or "this job has no paid judge")
        if (missing := call.micro_usd - account.free - self._taken) > 0:
            self._taken += self._fund.take(missing)
        if self._taken:
            self._log.record_and_apply(JudgesFunded(micro_usd=self._taken), now_ms)
            self._taken = 0
        if account.free >= call.micro_usd:
            held = MoneyHeld(worker=call.worker, boot=call.boot, seq=call.seq, micro_usd=call.micro_usd)
            self._log.record_and_apply(held, now_ms)
            return Held()
        if account.funded - account.spent >= call.micro_usd:
            return Wait()  # other workers hold the money, and may give some back
        text = (
            f"{JUDGES_USED_UP}: the next calls may cost ${call.micro_usd / 1e6:.4f}, and less is left of "
            f"${self._fund.limit / 1e6:.2f}"
        )
        self._log.state.queue.stop(text)
        self._log.state.changes += 1
        return NoMoney(text=text)

    def bill(self, call: BillJudge, now_ms: int) -> Done:
        """Record the calls of a hold. A repeated bill, and the bill of a hold that counts as spent, change nothing."""
        key = (call.worker, call.boot, call.seq)
        if key in self._log.state.judges.holds:
            calls = tuple(
                (paid_call.input_tokens, paid_call.output_tokens, paid_call.micro_usd) for paid_call in call.calls
            )
            self._spend(key, Judged(worker=call.worker, calls=calls), now_ms)
        return Done()

    def died(self, worker: str, boot: int, now_ms: int) -> None:
        """Count money held by a dead process, or by earlier processes of the same worker, as spent."""
        self._give_up(self._log.state.judges.of_worker(worker, before_boot=boot + 1), now_ms)

    def lost(self, node: str, now_ms: int) -> None:
        """Count money held on a lost node as spent. Otherwise the other workers would wait for the money for ever."""
        self._give_up([hold for hold in self._log.state.judges.holds if node_of(hold[0]) == node], now_ms)

    def _give_up(self, holds: Sequence[Hold], now_ms: int) -> None:
        for key in holds:
            held = self._log.state.judges.holds[key]
            self._spend(key, Judged(worker=key[0], unaccounted=held), now_ms)

    def _spend(self, key: Hold, event: Judged, now_ms: int) -> None:
        # Report first: a crash between the lines reports money twice, and never too little. While the disk is full,
        # the call is repeated, and reports nothing again.
        if event.micro_usd and key not in self._reported:
            self._report(event)
            self._reported.add(key)
        worker, boot, seq = key
        self._log.record_and_apply(JudgeBilled(worker=worker, boot=boot, seq=seq, micro_usd=event.micro_usd), now_ms)
        self._reported.discard(key)
        self._log.state.changes += 1
