"""Messages between the controller and the process of a sink: one JSON object a line, one answer to each question.

    Open -> Opened        begin or continue the run in the sink
    Records -> Accepted   add records; a record that the sink holds already is not added again
    Close -> Accepted     finish the run in the sink
    any -> Refused        what went wrong, in words

The sink is the truth about what it holds: `Opened.held` says from which record on the controller sends. So a process
that was killed leaves neither a gap nor a double, and no position is stored beside the sink.
"""

from typing import Annotated, Any, Literal

from pydantic import Field, TypeAdapter

from engine.strict import Strict

ENDS = Literal["finished", "stopped", "failed"]


class Record(Strict):
    """One row of the ledger as numbers: the end of an iteration, or an evaluation.

    `number` counts the records of the run from 0. `at_ms` is on the run's clock. `sheet`: a PNG on this machine.
    """

    number: int
    iteration: int
    at_ms: int
    values: dict[str, float]
    sheet: str | None = None


class Open(Strict):
    """`run_id`: the same at every start. `folder`: for the sink's files. `settings`: the sink's part of the job."""

    kind: Literal["open"] = "open"
    run_id: str
    name: str
    folder: str
    settings: dict[str, Any]
    job: dict[str, Any]
    facts: dict[str, str]


class Records(Strict):
    """`known`: the number of records that the ledger has by now."""

    kind: Literal["records"] = "records"
    records: tuple[Record, ...]
    known: int


class Close(Strict):
    kind: Literal["close"] = "close"
    state: ENDS


class Opened(Strict):
    """`held`: the number of records that the sink holds. `where`: the place of the run in the sink, for people.

    `offline`: why the records go into files of this machine only, and what sends them; empty: the sink was reached.
    """

    kind: Literal["opened"] = "opened"
    held: int
    where: str
    offline: str = ""


class Accepted(Strict):
    kind: Literal["accepted"] = "accepted"


class Refused(Strict):
    """`is_final`: another attempt would fail too."""

    kind: Literal["refused"] = "refused"
    text: str
    is_final: bool = False


Question = Annotated[Open | Records | Close, Field(discriminator="kind")]
Answer = Annotated[Opened | Accepted | Refused, Field(discriminator="kind")]
QUESTION: TypeAdapter[Open | Records | Close] = TypeAdapter(Question)
ANSWER: TypeAdapter[Opened | Accepted | Refused] = TypeAdapter(Answer)
