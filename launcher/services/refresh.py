"""Refresh prices: query every source at once, validate the answers, and store the result in one short transaction.

sources -> ask (threads, network) -> believe (pure) -> answers -> record (SQLite)

The promise: a failing source is reported and does not stop another source. The prices of a failing source are not
replaced by a guess.
"""

from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from sqlalchemy.orm import Session, sessionmaker

from engine.events import Market
from launcher.exit_codes import ExitCode, Failure
from launcher.ledger.prices import latest_prices, record_advice, record_prices
from launcher.ledger.store import writing
from launcher.market.instance_types import instance_types
from launcher.market.offers import CLOUDS
from launcher.market.prices import (
    CapacityAdvice,
    Fetched,
    PricePoint,
    PriceSource,
    Product,
    Refusal,
    believe,
    on_demand_prices,
)
from launcher.market.sources.asking import Patience


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """Result of querying one source."""

    source: str
    cloud: str
    points: tuple[PricePoint, ...] = ()
    refused: tuple[Refusal, ...] = ()
    advice: tuple[CapacityAdvice, ...] = ()
    failures: tuple[Failure, ...] = ()
    """Failures of the whole source, or of parts of the source. The remaining parts are kept."""
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Refreshed:
    """Answers of all sources, and the number of prices new to the ledger."""

    answers: tuple[Answer, ...]
    new: Mapping[str, int]
    """New prices by source."""

    @property
    def exit_code(self) -> ExitCode:
        """Return 0 if every source answered in full; missing credentials come before any other failure."""
        return exit_code_of(self.answers)


def exit_code_of(answers: Sequence[Answer]) -> ExitCode:
    codes = {failure.exit_code for answer in answers for failure in answer.failures}
    return next((code for code in (ExitCode.CREDENTIALS, ExitCode.STALE_CATALOG, *codes) if code in codes), ExitCode.OK)


def build_sources(
    clouds: Collection[str] = CLOUDS,
    *,
    since_ms: int,
    environ: Mapping[str, str],
    regions: Sequence[str] = (),
    accelerators: Collection[str] = (),
    patience: Patience | None = None,
) -> list[PriceSource]:
    """Build the price sources of the given clouds for the given GPUs; an empty collection selects all.

    On-demand sources come first, because on-demand prices judge the spot prices. `since_ms`: start of AWS's spot price
    history. `environ` names Google's endpoints and project.
    """
    from launcher.market.sources.aws import AwsOnDemand, AwsSpot
    from launcher.market.sources.gcp import GcpAdvice, GcpCatalog

    aws, gcp = instance_types(("aws",), accelerators), instance_types(("gcp",), accelerators)
    sources: list[PriceSource] = []
    if "aws" in clouds and aws:
        types = [machine.instance_type for machine in aws]
        sources.append(AwsOnDemand(types, regions=regions, patience=patience))
        sources.append(AwsSpot(types, since_ms=since_ms, regions=regions, patience=patience))
    if "gcp" in clouds and gcp:
        sources.append(GcpCatalog(gcp, environ=environ, regions=regions, patience=patience))
        sources.append(GcpAdvice(gcp, environ=environ, regions=regions, patience=patience))
    return sources


def ask(sources: Sequence[PriceSource], now_ms: int, on_demand: Mapping[Product, int] | None = None) -> list[Answer]:
    """Query all sources at once, then validate in the given order: earlier on-demand prices limit later spot prices.

    `on_demand`: known prices, for an on-demand source that does not answer now.
    """
    with ThreadPoolExecutor(max_workers=max(1, len(sources))) as pool:
        under_way = [pool.submit(_fetch, source, now_ms) for source in sources]
        fetched = [future.result() for future in under_way]
    limits = dict(on_demand or {})
    answers = []
    for source, came in zip(sources, fetched, strict=True):
        answer = _answer(source, came, now_ms, limits)
        limits |= on_demand_prices(answer.points)
        answers.append(answer)
    return answers


def _fetch(source: PriceSource, now_ms: int) -> Fetched | Failure:
    try:
        return source.fetch(now_ms)
    except Failure as failure:
        return failure


def _answer(source: PriceSource, came: Fetched | Failure, now_ms: int, limits: Mapping[Product, int]) -> Answer:
    if isinstance(came, Failure):
        return Answer(source=source.name, cloud=source.cloud, failures=(came,))
    credible = tuple(advice for advice in came.advice if advice.is_credible)
    notes, failures = came.notes, came.failures
    if dropped := len(came.advice) - len(credible):
        notes += (f"{source.name}: {dropped} estimates that are no chance and no time were left out",)
    points: tuple[PricePoint, ...] = ()
    refused: tuple[Refusal, ...] = ()
    # An empty answer from a source that failed in part does not prove that the source has no prices.
    if came.prices or (source.gives_prices and not failures):
        try:
            belief = believe(came.prices, source=source.name, now_ms=now_ms, on_demand=limits)
            points, refused = belief.points, belief.refused
        except Failure as failure:
            failures += (failure,)
    return Answer(
        source=source.name,
        cloud=source.cloud,
        points=points,
        refused=refused,
        advice=credible,
        failures=failures,
        notes=notes,
    )


def refresh(sources: Sequence[PriceSource], sessions: sessionmaker[Session], now_ms: int) -> Refreshed:
    """Query the sources, then store the validated prices: the network first, then one short transaction."""
    with sessions() as session:
        on_demand = on_demand_prices(latest_prices(session, market=Market.ON_DEMAND))
    answers = ask(sources, now_ms, on_demand)
    with writing(sessions) as session:
        new = {answer.source: record_prices(session, answer.points) for answer in answers}
        for answer in answers:
            record_advice(session, answer.advice)
    return Refreshed(answers=tuple(answers), new=new)
