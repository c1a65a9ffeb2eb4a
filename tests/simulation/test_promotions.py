"""Random schedules of promotions, frozen trainers and one bucket keep their promises; each planted bug is found."""

from collections.abc import Callable

import pytest

from engine.storage.checkpoint import CheckpointStore
from launcher.controller import facts_reader, node_specs
from launcher.decide import giving_back, promotion, reconcile
from launcher.decide.known_nodes import KnownNodes
from tests.mutants.planted_bug import changed
from tests.simulation.promotions import Broken, run_schedules

SCHEDULES, MOST = 20, 400
"""Schedules of `make test`, and the most in which a planted bug is looked for."""


def test_at_most_one_node_trains_and_nothing_that_was_saved_is_lost() -> None:
    totals = run_schedules(range(SCHEDULES))
    assert totals.promotions > SCHEDULES, "a schedule has a promotion, on average"
    assert totals.lineages > 2 * SCHEDULES
    assert totals.woken > SCHEDULES


Patch = Callable[[pytest.MonkeyPatch], None]


def promotes_beside_a_trainer(patch: pytest.MonkeyPatch) -> None:
    """Promote as soon as the trainer's node has a notice, before its end is on record."""
    real = promotion.successor_among
    patch.setattr(
        reconcile,
        "successor_among",
        lambda slot, held, facts, wanted: real(slot, [node for node in held if not node.is_leaving], facts, wanted),
    )
    patch.setattr(
        reconcile, "needs_successor", lambda slot, latest, held, facts: not latest.is_live or latest.is_leaving
    )


def takes_any_node(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(promotion, "can_take_over", lambda node: node.is_live)


def forgets_the_order(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(reconcile, "is_taking_over", lambda node: False)


def names_a_node_again(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(KnownNodes, "next_generation", lambda self, run, slot, generation: generation)


def has_no_fence(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(CheckpointStore, "check_lineage", lambda self, lineage: None)


def deletes_what_its_successor_reads(patch: pytest.MonkeyPatch) -> None:
    """Look for a newer lineage before the manifest is written, and not before older checkpoints are deleted."""
    looks = "self.check_lineage(checkpoint.lineage)\n    kept"
    patch.setattr(CheckpointStore, "save", changed(CheckpointStore.save, looks, "kept"))


def deletes_the_newest(patch: pytest.MonkeyPatch) -> None:
    kept = "kept = self.names()[-keep:]"
    patch.setattr(CheckpointStore, "save", changed(CheckpointStore.save, kept, "kept = self.names()[:keep]"))


def counts_the_end_of_a_trainer_that_was_given_up(patch: pytest.MonkeyPatch) -> None:
    rule = "end.at_ms < ended_ms.get(end.source, end.at_ms + 1)"
    patch.setattr(facts_reader, "newest_end", changed(facts_reader.newest_end, rule, "True"))


def gives_the_token_before_the_role(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(node_specs, "role_token", lambda token, role: token)


def gives_back_without_a_checkpoint(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(giving_back, "SAVED_MS", 10 * 60_000)


BUGS = (
    promotes_beside_a_trainer,
    takes_any_node,
    forgets_the_order,
    names_a_node_again,
    has_no_fence,
    deletes_what_its_successor_reads,
    deletes_the_newest,
    counts_the_end_of_a_trainer_that_was_given_up,
    gives_the_token_before_the_role,
    gives_back_without_a_checkpoint,
)


@pytest.mark.slow
@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.__name__)
def test_a_planted_fault_is_found(bug: Patch, monkeypatch: pytest.MonkeyPatch):
    bug(monkeypatch)
    with pytest.raises(Broken):
        run_schedules(range(MOST))
