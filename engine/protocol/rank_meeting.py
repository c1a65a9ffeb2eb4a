"""Where the ranks of a trainer meet, and which of the trainer's nodes were heard of.

Rank 0 serves a store and writes a `RankMeeting` into its node's folder; the coordinator beside it answers `GET /ranks`
with `RanksFound`; a process of each other node copies the meeting into its own folder, where its ranks look.
"""

from pathlib import Path

import msgspec

from engine.durable import write_durably


class RankMeeting(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The meeting place that one rank 0 makes. `port`: of its store; None: no rank 0 waits or trains now.

    `generation` names the group: every rank 0 has another. `is_over`: the run is finished, and needs no ranks.
    `iteration`: newest known weight version, on a node without the trainer's progress. `nodes`: numbers of the nodes
    whose ranks form the group; ranks of other nodes wait for a later meeting.
    """

    generation: int = 0
    port: int | None = None
    is_over: bool = False
    iteration: int = 0
    nodes: tuple[int, ...] = ()


class RanksFound(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The coordinator's answer. `up_ms`: age of the coordinator's process, which remembers no sign before it.

    `heard_ms`: milliseconds since the last sign of life of each heard node, by the node's number in the trainer.
    """

    meeting: RankMeeting
    heard_ms: dict[int, int]
    up_ms: int

    def silent_ms(self, node: int) -> int:
        """Return the longest time for which the node may have been silent."""
        return self.heard_ms.get(node, self.up_ms)


NO_MEETING = RankMeeting()


def read_meeting(file: Path) -> RankMeeting:
    """Return the meeting in a file; `NO_MEETING` if the file is absent or unreadable."""
    try:
        return msgspec.json.decode(file.read_bytes(), type=RankMeeting)
    except (OSError, ValueError):
        return NO_MEETING


def write_meeting(file: Path, meeting: RankMeeting) -> None:
    """Replace the meeting in a file. Raises OSError, e.g. if the disk is full."""
    write_durably(file, msgspec.json.encode(meeting))
