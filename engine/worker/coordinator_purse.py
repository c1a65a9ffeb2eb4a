"""Money and turns for calls of judges, asked from the coordinator (judge_desk.py and judge_turns.py there)."""

import threading
import time
from collections.abc import Sequence

from engine.protocol.messages import BillJudge, HoldMoney, NoMoney, PaidCall, TakeTurn, Turn
from engine.protocol.request import Wait
from engine.rewards.purse import BudgetUsedUp
from engine.worker.transport import Transport, ask

LOOK_SECONDS = 0.5
"""Interval of questions for money that others hold."""


class CoordinatorPurse:
    """Purse of one process. `worker`: name of the process's worker. Raises the errors of the transport."""

    def __init__(self, transport: Transport, *, worker: str, node: str, boot: int | None = None) -> None:
        self._transport, self._worker, self._node = transport, worker, node
        self._boot = time.time_ns() if boot is None else boot
        self._seq = 0
        self._lock = threading.Lock()

    def hold(self, micro_usd: int, *, wait: bool) -> int | None:
        # The pause is outside the lock: the money may be held by a payment of this process, which ends only after it
        # has asked for the money of another try.
        while (number := self._try_to_hold(micro_usd)) is None and wait:
            time.sleep(LOOK_SECONDS)
        return number

    def _try_to_hold(self, micro_usd: int) -> int | None:
        with self._lock:  # holds are asked for in order, so the coordinator recognises a repeated call
            self._seq += 1
            call = HoldMoney(worker=self._worker, node=self._node, boot=self._boot, seq=self._seq, micro_usd=micro_usd)
            answer, _ = ask(self._transport, call)
            if isinstance(answer, NoMoney):
                raise BudgetUsedUp(answer.text)
            return None if isinstance(answer, Wait) else self._seq

    def bill(self, hold: int, calls: Sequence[PaidCall]) -> None:
        bill = BillJudge(worker=self._worker, node=self._node, boot=self._boot, seq=hold, calls=tuple(calls))
        ask(self._transport, bill)

    def turn(self, judge: str, gap_seconds: float) -> float:
        call = TakeTurn(worker=self._worker, node=self._node, boot=self._boot, judge=judge, gap_seconds=gap_seconds)
        answer, _ = ask(self._transport, call)
        assert isinstance(answer, Turn)
        return answer.seconds
