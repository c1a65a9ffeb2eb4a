"""Refresh the prices of a run's nodes, beside the controller's passes."""

import os
import threading
import time

from sqlalchemy.orm import Session, sessionmaker

from engine.events import Market
from launcher.controller.controller import log
from launcher.job.schema import Job
from launcher.ledger.models import Run
from launcher.ledger.node_history import node_records
from launcher.market.prices import PriceSource
from launcher.money import HOUR_MS

SPOT_PRICE_SECONDS = 60.0
"""Time between two queries to AWS for the price of the run's spot nodes (wall time). The queries run beside the
passes."""

GCP_PRICE_SECONDS = 6 * 3600.0
"""Time between two reads of Google's price list (wall time). The list changes once a day at most, spot prices once a
month."""


def watch_prices(sessions: sessionmaker[Session], run: Run, job: Job, ended: threading.Event) -> None:
    """Refresh the ledger's prices of the run's nodes until the run ends.

    AWS changes a spot price while the node runs, and bills the new price. Google's prices hold for a day at least.
    After a failed refresh (the ledger is locked, a source does not answer) the next refresh follows as usual.
    """
    gcp_at = time.monotonic()
    while not ended.wait(SPOT_PRICE_SECONDS):
        is_due = time.monotonic() - gcp_at >= GCP_PRICE_SECONDS
        gcp_at = time.monotonic() if is_due else gcp_at
        try:
            _refresh_prices(sessions, run, job, with_gcp=is_due)
        except Exception as error:  # any error is survived, because old prices would meter the run wrongly from now on
            log.warning("prices could not be refreshed; tried again: %s", error)


def _refresh_prices(sessions: sessionmaker[Session], run: Run, job: Job, *, with_gcp: bool) -> None:
    """Fetch the AWS prices of the run's live spot nodes and, if `with_gcp`, Google's prices of the run's GPUs."""
    with sessions() as session:
        placements = [node.wanted.placement for node in node_records(session, run) if node.is_live and node.wanted]
    spot = [placement for placement in placements if placement.cloud == "aws" and placement.market is Market.SPOT]
    of_gcp = [placement for placement in placements if placement.cloud == "gcp"] if with_gcp else []
    if not spot and not of_gcp:
        return
    from launcher.market.instance_types import instance_types
    from launcher.market.sources.aws import AwsSpot
    from launcher.market.sources.gcp import GcpCatalog
    from launcher.services.refresh import refresh  # the import loads the clouds' own libraries

    now_ms = time.time_ns() // 1_000_000
    sources: list[PriceSource] = []
    if spot:
        types = sorted({placement.instance_type for placement in spot})
        regions = sorted({placement.region for placement in spot})
        sources.append(AwsSpot(types, since_ms=now_ms - HOUR_MS, regions=regions))
    if of_gcp:
        gcp_types = instance_types(("gcp",), {placement.accelerator for placement in of_gcp if placement.accelerator})
        sources.append(
            GcpCatalog(gcp_types, environ=os.environ, regions=sorted({placement.region for placement in of_gcp}))
        )
    for answer in refresh(sources, sessions, now_ms).answers:
        for failure in answer.failures:
            log.info("no new prices from %s: %s", answer.source, failure)
