"""The origin of a run's results: commands, git commits, hardware and versions, and the real time of the end."""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime

from sqlalchemy import select
from sqlalchemy.orm import Session

from engine.events import EngineStarted
from launcher.harmless import harmless
from launcher.ledger.models import Run, RunStatus, StartCommand
from launcher.ledger.store import node_events, progress_of


@dataclass(frozen=True, kw_only=True, slots=True)
class CommandLine:
    """A command that started or continued the run. `at`: wall time, ISO, UTC.

    A commit ends in `-dirty` if files differed from the commit; it is empty without git.
    """

    at: str
    command: str
    code_commit: str
    """Commit of spotrl itself, if it ran from a checkout."""
    workdir_commit: str
    """Commit of the job file's folder."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeHardware:
    """Hardware of a node as its agent saw it: GPUs, CPU and memory, in words."""

    node: str
    hardware: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Provenance:
    """The origin of a run's results. Runs of older versions have no commands and no hardware."""

    started_at: str
    """Wall time of the creation of the run; ISO, UTC."""
    ended_at: str
    """Wall time of the end of the run; empty if the run has not ended."""
    commands: tuple[CommandLine, ...]
    """The launch, then every resume."""
    hardware: tuple[NodeHardware, ...]
    versions: Mapping[str, str]
    """Versions of the libraries that the trainer used last."""


def provenance_of(session: Session, run: Run, end: RunStatus | None) -> Provenance:
    """Return the origin of the results. `end`: the run's last status; None if the run has not ended."""
    started = progress_of(session, run, EngineStarted.KIND)
    commands = session.scalars(select(StartCommand).where(StartCommand.run_id == run.id).order_by(StartCommand.id))
    return Provenance(
        started_at=_utc(run.clock_origin_ms),
        ended_at="" if end is None else _utc(run.wall_ms(end)),
        commands=tuple(
            CommandLine(
                at=_utc(run.wall_ms(row)),
                command=harmless(row.command),
                code_commit=row.code_commit,
                workdir_commit=row.workdir_commit,
            )
            for row in commands
        ),
        hardware=tuple(
            NodeHardware(node=node.name, hardware=harmless(event.evidence))
            for node, event in node_events(session, run)
            if event.kind == "ready" and event.evidence
        ),
        versions=dict(started[-1].event.get("versions", {})) if started else {},
    )


def hardware_by_nodes(provenance: Provenance) -> dict[str, list[str]]:
    """Return the names of the nodes by hardware: most nodes of a run are alike."""
    found: dict[str, list[str]] = {}
    for one in provenance.hardware:
        found.setdefault(one.hardware, []).append(one.node)
    return found


def _utc(wall_ms: int) -> str:
    return datetime.fromtimestamp(wall_ms / 1000, UTC).isoformat(timespec="seconds")
