"""Hold the nodes of a trainer together, through the coordinator on the first node.

    a further node            asks every second: a sign of life; copies the meeting of the ranks into its own folder
    rank 0, before a group    waits until every further node was heard; if the trainer may lack one, only for those
                              that were heard in the last AWAITED_SECONDS
    rank 0, with a group      ends itself when a node of it is silent for SILENT_SECONDS, which tears the group on all
                              nodes; and after a checkpoint, when a node that it lacked was heard
    other ranks               end themselves when rank 0 has begun another group (rank_rendezvous.py)

A killed node closes its connections, and every rank notices at once. A frozen or vanished node closes nothing; then
only the signs of life tell. A process of its own gives them, so a rank that holds Python's lock is no lost node.
"""

import contextlib
import math
import time
from collections.abc import Sequence
from pathlib import Path

import httpx
import msgspec

from engine.node.child import MEETING_FILE
from engine.node_spec import NodeSpec
from engine.protocol.messages import Span
from engine.protocol.rank_meeting import RanksFound, read_meeting, write_meeting
from engine.worker.usage import Usage

SIGN_SECONDS = 1.0
"""Interval of a node's questions, and of those of a rank 0 that waits."""

SILENT_SECONDS = 10.0
"""Silence of a node after which the node counts as lost."""

FRESH_SECONDS = 3.0
"""Age of a sign of life with which a node counts as present, before a group is formed."""

AWAITED_SECONDS = 50.0
"""Silence of a node after which a trainer that may lack it trains without it. A restarted agent is back sooner."""

ANSWER_SECONDS = 2.0
"""Longest wait for the coordinator's answer."""


def meeting_file(spec: NodeSpec) -> Path:
    """Return the file with the meeting of the ranks in this node's folder."""
    return Path(spec.folder) / MEETING_FILE


class RankCalls:
    """Calls of a trainer's node to the coordinator about the ranks, with one client: a new one takes 17 ms of a core.

    A coordinator that does not answer is no error: it starts again, or its node is bought again.
    """

    def __init__(self, spec: NodeSpec) -> None:
        self._place = {"number": spec.trainer_node, "generation": spec.generation}
        self._client = httpx.Client(
            base_url=f"http://{spec.coordinator_host}:{spec.coordinator_port}",
            headers={"Authorization": f"Bearer {spec.own_token}"},
            timeout=ANSWER_SECONDS,
            trust_env=False,
        )

    def ask(self) -> RanksFound | None:
        """Ask for the meeting. None: the coordinator does not answer, or not as it should."""
        with contextlib.suppress(httpx.HTTPError, ValueError):
            answer = self._client.get("/ranks", params=self._place).raise_for_status()
            return msgspec.json.decode(answer.content, type=RanksFound)
        return None

    def report(self, node: str, rank: int, of: int, spans: Sequence[Span]) -> None:
        """Report the times of a rank, one of `of` on its node. Times that cannot be sent count as idle."""
        query: dict[str, str | int] = {"node": node, "rank": rank, "of": of}
        with contextlib.suppress(httpx.HTTPError):
            self._client.post("/ranks", params=query, content=msgspec.json.encode(spans))


def copy_meeting(spec: NodeSpec) -> None:
    """Give signs of life, and copy the meeting, until the run needs no ranks of this node any more."""
    file, calls = meeting_file(spec), RankCalls(spec)
    while True:
        answer = calls.ask()
        if answer is not None:
            meeting = read_meeting(file)
            new = msgspec.structs.replace(answer.meeting, iteration=max(answer.meeting.iteration, meeting.iteration))
            if new.is_over:
                return
            if new != meeting:
                with contextlib.suppress(OSError):  # a full disk: the next answer is copied
                    write_meeting(file, new)
        time.sleep(SIGN_SECONDS)


class OtherNodes:
    """Rank 0's view of the other nodes of the trainer."""

    def __init__(self, spec: NodeSpec) -> None:
        self._calls = RankCalls(spec)
        self._numbers = range(1, spec.trainer_nodes)
        self._may_lack = spec.may_lack_ranks
        self._members: Sequence[int] = self._numbers
        """The other nodes of the group."""

    def wait(self) -> tuple[int, ...]:
        """Wait for the other nodes, and return the numbers of the nodes that form the group, this one first.

        A lost node is bought again, which takes any time: a trainer that may lack it begins without it.
        """
        reported: list[int] = []
        while self._numbers:
            answer = self._calls.ask()
            absent = self.absent(answer)
            if not absent or (self._may_lack and answer is not None and not self.awaited(answer, absent)):
                self._members = [number for number in self._numbers if number not in absent]
                if absent:
                    print(f"trains without the trainer's nodes {absent}", flush=True)
                break
            if absent != reported:
                print(f"waits for the trainer's nodes {absent}", flush=True)
                reported = absent
            time.sleep(SIGN_SECONDS)
        return (0, *self._members)

    def are_silent(self) -> bool:
        """Return True if a node of the group was silent for too long."""
        answer = self._calls.ask()
        lost = [] if answer is None else self.silent(answer)
        if lost:
            print(f"the trainer's nodes {lost} are silent", flush=True)
        return bool(lost)

    def have_come(self) -> bool:
        """Return True if a node that the group lacks was heard."""
        if len(self._members) == len(self._numbers) or (answer := self._calls.ask()) is None:
            return False
        absent = self.absent(answer)
        come = [number for number in self._numbers if number not in self._members and number not in absent]
        if come:
            print(f"the trainer's nodes {come} are there", flush=True)
        return bool(come)

    def absent(self, answer: RanksFound | None) -> list[int]:
        """Return the nodes without a fresh sign of life. `answer`: None if the coordinator did not answer."""
        heard_ms = {} if answer is None else answer.heard_ms
        return [number for number in self._numbers if heard_ms.get(number, math.inf) > 1000 * FRESH_SECONDS]

    def awaited(self, answer: RanksFound, absent: Sequence[int]) -> list[int]:
        """Return those of the absent nodes that were not silent for long yet."""
        return [number for number in absent if answer.silent_ms(number) < 1000 * AWAITED_SECONDS]

    def silent(self, answer: RanksFound) -> list[int]:
        """Return the nodes of the group that were silent for too long."""
        return [number for number in self._members if answer.silent_ms(number) > 1000 * SILENT_SECONDS]


class RankReport:
    """Times of a rank that does not sample, for the report of the run's costs. A worker reports its own times."""

    def __init__(self, spec: NodeSpec, rank: int, *, of: int) -> None:
        """Start without times. `of`: GPUs of the node."""
        self._node, self._rank, self._calls, self._of = spec.node, rank, RankCalls(spec), of
        self.usage = Usage(spec.clock.clock())

    def send(self) -> None:
        """Send the times since the last call. The first call tells that the node has joined."""
        self._calls.report(self._node, self._rank, self._of, self.usage.take())
