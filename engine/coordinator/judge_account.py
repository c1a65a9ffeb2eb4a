"""Account of the run's paid judges: money taken from the budget, money held for calls, and money spent. Pure.

    funded = spent + held + free

A worker holds money before it calls a judge, and bills its calls afterwards. Money held by a worker that died counts as
spent, because its calls may have been made. The promise: spent plus held never exceeds funded, unless a call costs more
than the job says that a call can cost.
"""

from collections.abc import Iterator

from engine.protocol.records import JudgeBilled, JudgesFunded, MoneyFact, MoneyHeld

Hold = tuple[str, int, int]
"""Worker, boot and number of a hold."""


class JudgeAccount:
    """Money in micro-dollars. Only `apply` changes it."""

    def __init__(self) -> None:
        self.funded = self.spent = 0
        self.holds: dict[Hold, int] = {}
        self._billed: dict[str, tuple[int, int]] = {}
        """By worker: boot and number of the newest billed hold."""

    @property
    def free(self) -> int:
        return self.funded - self.spent - sum(self.holds.values())

    def is_known(self, hold: Hold) -> bool:
        """Return True for a hold that exists, or that was billed before."""
        worker, boot, seq = hold
        return hold in self.holds or (boot, seq) <= self._billed.get(worker, (-1, -1))

    def of_worker(self, worker: str, before_boot: int) -> list[Hold]:
        """Return the holds of earlier processes of a worker."""
        return [hold for hold in self.holds if hold[0] == worker and hold[1] < before_boot]

    def apply(self, record: MoneyFact) -> None:
        match record:
            case JudgesFunded():
                self.funded += record.micro_usd
            case MoneyHeld():
                self.holds[record.worker, record.boot, record.seq] = record.micro_usd
            case JudgeBilled():
                self.holds.pop((record.worker, record.boot, record.seq), None)
                self.spent += record.micro_usd
                number = (record.boot, record.seq)
                self._billed[record.worker] = max(number, self._billed.get(record.worker, number))

    def records(self) -> Iterator[MoneyFact]:
        """Yield the records that restore this account."""
        if self.funded:
            yield JudgesFunded(micro_usd=self.funded)
        for (worker, boot, seq), micro_usd in self.holds.items():
            yield MoneyHeld(worker=worker, boot=boot, seq=seq, micro_usd=micro_usd)
        spent = self.spent
        for worker, (boot, seq) in self._billed.items():
            yield JudgeBilled(worker=worker, boot=boot, seq=seq, micro_usd=spent)
            spent = 0
