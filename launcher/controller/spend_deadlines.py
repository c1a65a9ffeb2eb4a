"""Spend deadlines: the times at which nodes terminate themselves if no controller is left."""

from functools import partial

from engine.events import Market
from launcher.decide import budget_guard
from launcher.decide.facts import OVER, Facts, Wanted
from launcher.decide.run_budget import planned_hourly, stuck_micro_usd
from launcher.decide.steps import Steps
from launcher.ledger.models import Node
from launcher.market.side_prices import side_micro_usd_per_hour
from launcher.provision.provisioner import Provisioner

REARM_MS = 60_000
"""Smallest gain in ms for which a node's spend deadline is extended (run's clock)."""


class SpendDeadlines:
    """Computes the spend deadlines, and sends a node its deadline after a change.

    Money left unspent while a node was missing extends the deadlines.
    """

    def __init__(self, provisioner: Provisioner, is_cloud: bool) -> None:
        self._provisioner, self._is_cloud = provisioner, is_cloud
        self._armed: dict[str, int] = {}
        """By node: the deadline that was sent last (ms on the run's clock)."""

    def longest_ms(self, node: Node, facts: Facts, wanted: Wanted) -> int | None:
        """Return the longest life of this node in ms.

        The remaining money would pay for this node alone for that time.

        None: no limit.
        """
        rate = node.micro_usd_per_hour + side_micro_usd_per_hour(node.cloud, Market(node.market), node.disk_gib)
        limits = (
            (facts.metered, wanted.limits.max_total),
            (facts.metered + facts.others.metered, wanted.all_runs.max_total),
        )
        lasts_ms = [
            budget_guard.money_deadline_ms(now_ms=0, metered=metered, max_total=max_total, planned_hourly=rate)
            for metered, max_total in limits
        ]
        return min((last_ms + wanted.allowance_ms for last_ms in lasts_ms if last_ms is not None), default=None)

    def send(self, facts: Facts, wanted: Wanted, steps: Steps, *, may_extend: bool) -> None:
        """Extend the nodes' spend deadlines by money left unspent while a node was missing.

        No deadline is extended while the clock is in doubt: spending may be missing from the metered sum. The same
        holds if the facts of this pass are not whole (`may_extend` is False). An earlier deadline is still sent then.
        """
        if facts.doubt is not None:
            return
        deadline_ms = self.deadline_ms(facts, wanted, facts.now_ms)
        if deadline_ms is None or facts.stage in OVER:
            return
        for node in (*facts.nodes, *facts.kept):
            armed = self._armed.get(node.name)
            is_earlier = armed is not None and deadline_ms < armed - 1000
            is_later = armed is None or deadline_ms > armed + REARM_MS
            if node.is_live and (is_earlier or (is_later and may_extend)):
                steps.take(partial(self._rearm, node.name, deadline_ms), None)

    def _rearm(self, name: str, deadline_ms: int) -> None:
        self._provisioner.rearm(name, deadline_ms)
        self._armed[name] = deadline_ms

    def deadline_ms(self, facts: Facts, wanted: Wanted, now_ms: int) -> int | None:
        """Return the time at which an unmanaged node terminates itself.

        The time is the earliest spend deadline, or on clouds the end of the run if earlier.
        """
        planned = planned_hourly(facts, wanted)
        # A node that cannot be ended cannot be told a new deadline either. Its money is not there for the others.
        spent = facts.metered + stuck_micro_usd(facts, wanted)
        deadlines = [
            budget_guard.money_deadline_ms(
                now_ms=now_ms,
                metered=spent,
                max_total=wanted.limits.max_total,
                planned_hourly=planned,
            ),
            # The other runs may also be without a controller, and all runs share the remaining money.
            budget_guard.money_deadline_ms(
                now_ms=now_ms,
                metered=spent + facts.others.metered,
                max_total=wanted.all_runs.max_total,
                planned_hourly=planned + facts.others.planned_hourly,
            ),
        ]
        if self._is_cloud and wanted.last_ms is not None:
            # Add the time of a stop, so that a live controller stops the run first.
            deadlines.append(wanted.last_ms + wanted.allowance_ms)
        return min((deadline_ms for deadline_ms in deadlines if deadline_ms is not None), default=None)
