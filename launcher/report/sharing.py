"""SP groups of a run (workers that share an image's sequence), from the engine's events, as values and as text."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Event = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Sharing:
    """The regroups of a whole run: their number, their nodes, and the sizes of the groups."""

    regroups: int
    nodes: int
    """Number of nodes with at least one regroup."""
    degrees: tuple[int, ...]
    """Distinct sizes of the SP groups, ascending. A group of size 1 is a worker alone."""


def sharing_of(regrouped: Sequence[Event]) -> Sharing | None:
    """Return the regroups of a run, or None if the run never regrouped. `regrouped`: Regrouped events."""
    if not regrouped:
        return None
    return Sharing(
        regroups=len(regrouped),
        nodes=len({event["node"] for event in regrouped}),
        degrees=tuple(sorted({len(group) for event in regrouped for group in event["groups"]})),
    )


def sharing_words(sharing: Sharing | None) -> str:
    """Return a sentence on the regroups; empty for a run without SP groups."""
    if sharing is None:
        return ""
    regroups = "1 regroup" if sharing.regroups == 1 else f"{sharing.regroups:,} regroups"
    nodes = "1 node" if sharing.nodes == 1 else f"{sharing.nodes} nodes"
    return f"Shared images: {regroups} on {nodes}; degrees {', '.join(map(str, sharing.degrees))}."


def groups_text(groups: Sequence[Sequence[str]]) -> str:
    """Return the groups of one node as text. `0+1 2`: workers 0 and 1 form an SP group, worker 2 is alone."""
    return " ".join("+".join(worker.rpartition("/")[2] for worker in group) for group in groups)
