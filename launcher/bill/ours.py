"""Which node or run of the ledger a row of a bill is about.

By the label of the node, then by the id of its instance, then by the label of the run. A row counts only if its account
and its owner are those of the run, as far as both are known, and if it is not older than the node: other people may
give their runs the same names.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from sqlalchemy import select
from sqlalchemy.orm import Session

from launcher.bill.rows import BillRow
from launcher.clouds.base import NODE_LABEL, OWNER_LABEL, RUN_LABEL
from launcher.ledger.models import LOCAL, BillLine, Node, Run
from launcher.report.run_files import accounts_of, instance_id, owners_of


@dataclass(frozen=True, kw_only=True, slots=True)
class OurRun:
    """A run on clouds. `accounts`, `owners`: by cloud; empty if the run's files are gone."""

    id: int
    name: str
    created_ms: int
    accounts: Mapping[str, str]
    owners: Mapping[str, str]


@dataclass(frozen=True, kw_only=True, slots=True)
class OurNode:
    id: int
    name: str
    cloud: str
    requested_ms: int
    gpus: int
    run: OurRun


@dataclass(frozen=True, kw_only=True, slots=True)
class Match:
    """The owner of a row: a run and maybe its node, or `why` the row is not ours."""

    run: OurRun | None = None
    node: OurNode | None = None
    why: str = ""


@dataclass(frozen=True, kw_only=True)
class Ours:
    """All nodes on clouds that the ledger knows, by their names and by the ids of their instances."""

    runs: Mapping[str, OurRun]
    nodes: Mapping[str, OurNode]
    by_resource: Mapping[str, OurNode]

    def match(self, row: BillRow) -> Match:
        """Return whose row it is. A row without our label, about none of our instances, has no match and no `why`."""
        node = self.nodes.get(row.labels.get(NODE_LABEL, ""))
        if node is None or node.cloud != row.cloud:
            node = next((self.by_resource[name] for name in row.resources if name in self.by_resource), None)
        run = node.run if node is not None else self.runs.get(row.labels.get(RUN_LABEL, ""))
        if run is None:
            return Match(why="no run of this ledger has its label" if row.labels else "")
        account, owner = run.accounts.get(row.cloud, ""), run.owners.get(row.cloud, "")
        if account and account != row.account:
            return Match(why=f"{run.name} ran in account {account}, the row is of {row.account}")
        if owner and row.labels.get(OWNER_LABEL, owner) != owner:
            return Match(why=f"{run.name} of this ledger belongs to {owner}, the row to {row.labels[OWNER_LABEL]}")
        if row.end_ms <= (run.created_ms if node is None else node.requested_ms):
            return Match(why=f"it is older than {run.name if node is None else node.name} of this ledger")
        return Match(run=run, node=node)


def ours_of(session: Session) -> Ours:
    """Read the nodes on clouds from the ledger, the runs' files, and what earlier bills said of their resources."""
    runs = {
        run.id: OurRun(
            id=run.id,
            name=run.name,
            created_ms=run.created_ms,
            accounts=accounts_of(run),
            owners=owners_of(run),
        )
        for run in session.scalars(select(Run).where(Run.infra != LOCAL))
    }
    folders = {run.id: run for run in session.scalars(select(Run).where(Run.infra != LOCAL))}
    nodes = {
        node.id: OurNode(
            id=node.id,
            name=node.name,
            cloud=node.cloud,
            requested_ms=node.requested_ms,
            gpus=node.gpus,
            run=runs[node.run_id],
        )
        for node in session.scalars(select(Node).where(Node.run_id.in_(runs)).order_by(Node.id))
    }
    by_resource = {
        resource: nodes[node_id]
        for resource, node_id in session.execute(
            select(BillLine.resource, BillLine.node_id).where(BillLine.node_id.is_not(None)).distinct()
        )
        if resource and node_id in nodes
    }
    for node in nodes.values():
        if instance := instance_id(folders[node.run.id], node.name):
            by_resource[instance] = node
    return Ours(
        runs={run.name: run for run in runs.values()},
        nodes={node.name: node for node in nodes.values()},
        by_resource=by_resource,
    )
