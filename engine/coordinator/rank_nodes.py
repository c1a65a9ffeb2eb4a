"""The further nodes of a trainer, as the coordinator hears them: each question for the meeting is a sign of life.

Nothing is kept over a restart: the meeting is a file of rank 0, and nodes ask again every second.
"""

import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from engine.protocol.rank_meeting import RankMeeting, RanksFound, read_meeting


class RankNodes:
    """Signs of life by node, and rank 0's meeting file."""

    def __init__(self, file: Path, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock`: in seconds."""
        self._file, self._clock = file, clock
        self._began = clock()
        self._heard: dict[int, float] = {}
        self._newest: dict[int, int] = {}
        """Newest generation of a node that came with each number."""

    def found(self, iteration: int) -> RanksFound:
        """Return the meeting and the silence of each heard node. `iteration`: newest published weight version."""
        now = self._clock()
        meeting = msgspec.structs.replace(read_meeting(self._file), iteration=iteration)
        heard_ms = {number: round(1000 * (now - at)) for number, at in self._heard.items()}
        return RanksFound(meeting=meeting, heard_ms=heard_ms, up_ms=round(1000 * (now - self._began)))

    def answer(self, number: int, generation: int, iteration: int) -> RanksFound:
        """Note a sign of life of the trainer's node `number`, and return `found`.

        A node whose successor came is told that the run is over: it may have been frozen, and would tear the group.
        """
        answer = self.found(iteration)
        if generation < self._newest.get(number, 0):
            return msgspec.structs.replace(answer, meeting=RankMeeting(is_over=True))
        self._newest[number], self._heard[number] = generation, self._clock()
        return answer
