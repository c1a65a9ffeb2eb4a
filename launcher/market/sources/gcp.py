"""Google Cloud's prices: instances added up from the billing catalog's parts, and the capacity advisor's estimates.

billing SKUs -> parts (core, memory, GPU, local SSD) -> one price per instance type, region and market
capacity advisor -> spot price history of a zone, preemption rate, obtainability, expected uptime

`SPOTRL_GCP_BILLING_ENDPOINT` and `SPOTRL_GCP_COMPUTE_ENDPOINT` name another server (a test's, a proxy's). No
credentials are sent to another server. The catalog prices no instance. A sum with a missing or unclear part is reported
and refused. Traps in real catalogs (research notes cost 2): calendar-mode and DWS rates that look like on-demand, spot
SKUs of B200 filed as OnDemand, A3 Ultra hosts with SKUs of their own, A4 sold whole.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from engine.events import Market
from launcher.exit_codes import Failure
from launcher.market.machines import Machine
from launcher.market.prices import AdviceKind, CapacityAdvice, Fetched, RawPrice, time_ms
from launcher.market.sources.asking import MissingCredentials, Patience, SourceFailed, ask_all, not_installed
from launcher.money import HOUR_MS

CATALOG = "gcp billing skus"
ADVICE_HISTORY = "gcp compute advice.capacityHistory"
ADVICE = "gcp compute advice.capacity"

COMPUTE_ENGINE = "services/6F81-5844-456A"
PAGE = 5000

BILLING_ENDPOINT = "SPOTRL_GCP_BILLING_ENDPOINT"
COMPUTE_ENDPOINT = "SPOTRL_GCP_COMPUTE_ENDPOINT"
PROJECT = "GOOGLE_CLOUD_PROJECT"

HOURS_IN_MONTH = 730
"""Hours by which Google divides a month's price (Google's pages on disk prices)."""

NEEDS = "prices need the Cloud Billing API enabled and the role Compute Viewer"


# --- parts -------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class Sku:
    """A line of the billing catalog, as text. `price` is for one `unit`, after any free usage."""

    sku_id: str
    description: str
    usage_type: str
    regions: tuple[str, ...]
    unit: str
    price: str
    currency: str
    effective: str


HOSTS = {
    "n1": "N1 Predefined Instance",
    "g2": "G2 Instance",
    "a2": "A2 Instance",
    "a3-highgpu": "A3 Instance",
    "a3-ultragpu": "A3Ultra Instance",
}
"""Names of a series' cores and memory in the catalog."""

GPUS = {
    "V100": "Nvidia Tesla V100 GPU",
    "T4": "Nvidia Tesla T4 GPU",
    "L4": "Nvidia L4 GPU",
    "A100": "Nvidia Tesla A100 GPU",
    "A100-80GB": "Nvidia Tesla A100 80GB GPU",
    "H100": "Nvidia H100 80GB GPU",
    "H200": "H200 141GB GPU",
}

WHOLE = {"B200": "A4 Nvidia B200 (1 gpu slice)"}
"""GPUs priced with their share of the host: cores, memory and disks have no price of their own."""

LOCAL_SSD = "SSD backed Local Storage"

CORE_HOUR, GIB_HOUR, GIB_MONTH = "h", "GiBy.h", "GiBy.mo"

ANOTHER_PRODUCT = re.compile(
    r"\b(Calendar Mode|DWS|Commitment|Reserved|Sole Tenancy|Custom|Premium|suspended|vGPU)\b", re.IGNORECASE
)
"""Rates that need more than just starting an instance."""

DESCRIPTION = re.compile(
    r"(?P<spot>Spot Preemptible )?(?P<part>.+?)(?P<attached> attached to (?:Spot )?Preemptible VMs)?"
    r"(?: running)?(?: in .+)?",
    re.IGNORECASE,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """A number of units of one SKU in an instance type."""

    name: str
    unit: str
    count: Decimal


def parts_of(machine: Machine) -> tuple[Part, ...]:
    """Return the parts of an instance type, the GPU first.

    Disks are priced by the month: 375 GiB for an hour is 375/730.
    """
    if machine.accelerator in WHOLE:
        return (Part(name=WHOLE[machine.accelerator], unit=CORE_HOUR, count=Decimal(machine.gpus)),)
    series = machine.instance_type.split("-")[0]
    host = HOSTS.get(series) or HOSTS["-".join(machine.instance_type.split("-")[:2])]
    parts = [
        Part(name=GPUS[machine.accelerator], unit=CORE_HOUR, count=Decimal(machine.gpus)),
        Part(name=f"{host} Core", unit=CORE_HOUR, count=Decimal(machine.vcpus)),
        Part(name=f"{host} Ram", unit=GIB_HOUR, count=Decimal(machine.mem_gib)),
    ]
    if machine.local_ssd_gib:
        hours = Decimal(machine.local_ssd_gib) / HOURS_IN_MONTH
        parts.append(Part(name=LOCAL_SSD, unit=GIB_MONTH, count=hours))
    return tuple(parts)


def market_of(sku: Sku) -> tuple[str, Market] | None:
    """Return the part and the market priced by a SKU; None for another product.

    If the description says Spot and the usage type says OnDemand, the description is right: spot B200 is filed this
    way.
    """
    found = DESCRIPTION.fullmatch(sku.description)
    if found is None or ANOTHER_PRODUCT.search(sku.description) or sku.usage_type not in ("OnDemand", "Preemptible"):
        return None
    is_spot = sku.usage_type == "Preemptible" or bool(found["spot"] or found["attached"])
    return found["part"], Market.SPOT if is_spot else Market.ON_DEMAND


def assemble(skus: Iterable[Sku], machines: Sequence[Machine], regions: Sequence[str] = ()) -> Fetched:
    """Compute the price of each instance type in each region with its GPU, as rows for `believe`. Pure.

    If a part has no SKU, an unreadable SKU, or several SKUs at different prices, the price of the row is a text with
    the reason, and `believe` refuses the row. Example: 8 GPUs at $9.79655, 208 cores at $0.03, 1,872 GiB at $0.0017 and
    6,000 GiB of SSD at $0.08 a month are 78.3724 + 6.24 + 3.1824 + 0.657534 = $88.452334.
    """
    wanted = {part.name for machine in machines for part in parts_of(machine)}
    offered: defaultdict[tuple[str, str, Market], list[Sku]] = defaultdict(list)
    left_out = []
    for sku in skus:
        named = market_of(sku)
        if named is None:
            left_out += [sku] if any(name in sku.description for name in wanted) else []
        elif named[0] in wanted:
            for region in sku.regions:
                offered[named[0], region, named[1]].append(sku)
    everywhere = sorted({region for _, region, _ in offered})
    rows = (
        _assembled(machine, region, market, offered)
        for machine in machines
        for region in everywhere
        if not regions or region in regions
        for market in machine.markets
        if (parts_of(machine)[0].name, region, market) in offered
    )
    return Fetched(prices=tuple(rows), notes=_left_out(left_out))


def _left_out(skus: Sequence[Sku]) -> tuple[str, ...]:
    if not skus:
        return ()
    rates = "rates of calendar mode, DWS, commitments or reservations, or of no known kind"
    return (f"{CATALOG}: {len(skus)} SKUs were left out ({rates}), for one {skus[0].description!r}",)


def _assembled(
    machine: Machine, region: str, market: Market, offered: Mapping[tuple[str, str, Market], Sequence[Sku]]
) -> RawPrice:
    total, used, gap = Decimal(0), [], ""
    for part in parts_of(machine):
        skus = offered.get((part.name, region, market), ())
        if gap := _gap(part, skus):
            break
        total += part.count * Decimal(skus[0].price)
        used.append(skus[0])
    foreign = [sku.currency for sku in used if sku.currency != "USD"]
    return RawPrice(
        cloud="gcp",
        region=region,
        zone="",
        zone_id="",
        instance_type=machine.instance_type,
        market=market,
        price=gap or f"{total:f}",
        currency=foreign[0] if foreign else "USD",
        unit="hour",
        effective=max((sku.effective for sku in used), default=""),
        source=CATALOG,
        source_id="+".join(sku.sku_id for sku in used),
    )


def _gap(part: Part, skus: Sequence[Sku]) -> str:
    """Return the reason that this part has no price; empty if the part has a price."""
    if not skus:
        return f"incomplete: no SKU of {part.name}"
    if len({sku.price for sku in skus}) > 1:
        both = " and ".join(f"{sku.price} ({sku.sku_id})" for sku in skus)
        return f"unclear: {part.name} costs {both}"
    try:
        price = Decimal(skus[0].price)
    except ArithmeticError:
        return f"incomplete: SKU {skus[0].sku_id} of {part.name} has no price"
    if skus[0].unit != part.unit:
        return f"unclear: {part.name} is priced by {skus[0].unit or 'no unit'}, not by {part.unit}"
    # A part with a price of 0 would hide in the sum.
    return "" if price > 0 else f"unclear: {part.name} costs {skus[0].price} (SKU {skus[0].sku_id})"


# --- queries -----------------------------------------------------------------------------------------


class GcpCatalog:
    """Instance prices per region, added up from the public billing catalog. Empty `regions`: all regions."""

    name, cloud, gives_prices = CATALOG, "gcp", True

    def __init__(
        self,
        machines: Sequence[Machine],
        *,
        environ: Mapping[str, str],
        regions: Sequence[str] = (),
        patience: Patience | None = None,
    ) -> None:
        self._machines, self._regions = tuple(machines), tuple(regions)
        self._access = _Access(environ, BILLING_ENDPOINT, patience or Patience())

    def fetch(self, now_ms: int) -> Fetched:
        with _said(self.name):
            from google.cloud import billing_v1

            client = billing_v1.CloudCatalogClient(transport="rest", **self._access.options())
            request = billing_v1.ListSkusRequest(parent=COMPUTE_ENGINE, page_size=PAGE)
            pages = client.list_skus(request=request, **self._access.limits()).pages
            # Read the bare message: through the wrapper, reading all SKUs takes twice as long.
            found = [_sku(sku) for page in pages for sku in billing_v1.ListSkusResponse.pb(page).skus]
        if not found:
            return Fetched()
        return assemble(found, self._machines, self._regions)


def _sku(sku: Any) -> Sku:
    """Convert a SKU of the API.

    Gaps become empty strings and raise no error; instance types with the SKU are refused later.
    """
    pricing = sku.pricing_info[-1] if sku.pricing_info else None
    tiers = pricing.pricing_expression.tiered_rates if pricing else ()
    price = tiers[-1].unit_price if tiers else None
    return Sku(
        sku_id=sku.sku_id,
        description=sku.description,
        usage_type=sku.category.usage_type,
        regions=tuple(sku.service_regions),
        unit=pricing.pricing_expression.usage_unit if pricing else "",
        price=_money(price.units, price.nanos) if price else "",
        currency=price.currency_code if price else "",
        effective=pricing.effective_time.ToJsonString() if pricing else "",
    )


def _money(units: int, nanos: int) -> str:
    return f"{Decimal(units) + Decimal(nanos).scaleb(-9):f}"


class GcpAdvice:
    """Capacity advice per zone: spot prices of the last weeks, preemption rates, odds of `size` instances now.

    Compute Engine has no history of N1 instances with attached GPUs, so N1 types are not queried.
    """

    name, cloud, gives_prices = ADVICE_HISTORY, "gcp", False

    def __init__(
        self,
        machines: Sequence[Machine],
        *,
        environ: Mapping[str, str],
        regions: Sequence[str] = (),
        size: int = 1,
        patience: Patience | None = None,
    ) -> None:
        self._types = tuple(m.instance_type for m in machines if m.instance_type == m.machine_type)
        self._regions, self._size = tuple(regions), size
        self._access = _Access(environ, COMPUTE_ENDPOINT, patience or Patience())

    def fetch(self, now_ms: int) -> Fetched:
        if not self._types:
            return Fetched(notes=(f"{self.name}: not asked, it knows no N1 machine with a GPU",))
        with _said(self.name):
            from google.cloud import compute_v1

            project = self._access.project()
            client = compute_v1.AdviceClient(**self._access.options())
            pools = self._pools(compute_v1, project)
        answers, failures = ask_all(pools, lambda pool: self._of_pool(compute_v1, client, project, pool, now_ms))
        return Fetched(
            prices=tuple(one for one in answers if isinstance(one, RawPrice)),
            advice=tuple(one for one in answers if isinstance(one, CapacityAdvice)),
            failures=tuple(failures),
        )

    def _pools(self, compute: Any, project: str) -> list[tuple[str, str]]:
        """Return every zone with one of the instance types, as pairs of zone and type."""
        client = compute.MachineTypesClient(**self._access.options())
        request = compute.AggregatedListMachineTypesRequest(
            project=project, filter=" OR ".join(f'(name = "{name}")' for name in self._types)
        )
        pools = [
            (scope.removeprefix("zones/"), machine.name)
            for scope, listed in client.aggregated_list(request=request, **self._access.limits())
            for machine in listed.machine_types
        ]
        return sorted(pool for pool in pools if not self._regions or region_of(pool[0]) in self._regions)

    def _of_pool(
        self, compute: Any, client: Any, project: str, pool: tuple[str, str], now_ms: int
    ) -> Iterator[RawPrice | CapacityAdvice]:
        zone, instance_type = pool
        with _said(f"{ADVICE_HISTORY}, {instance_type} in {zone}"):
            history = client.capacity_history(
                project=project,
                region=region_of(zone),
                capacity_history_request_resource=_history_request(compute, zone, instance_type),
                **self._access.limits(),
            )
            advised = client.capacity(
                project=project,
                region=region_of(zone),
                capacity_advice_request_resource=_advice_request(compute, zone, instance_type, self._size),
                **self._access.limits(),
            )
        for record in history.price_history:
            yield _spot_price(zone, instance_type, record)
        for record in history.preemption_history:
            since, until = time_ms(record.interval.start_time), time_ms(record.interval.end_time)
            if since is not None and until is not None and "preemption_rate" in record:
                kind, rate = AdviceKind.PREEMPTION_RATE, record.preemption_rate
                yield _advice(zone, instance_type, kind, rate, since, until, now_ms, ADVICE_HISTORY)
        for recommendation in advised.recommendations:
            scores = recommendation.scores
            if "obtainability" in scores:
                kind, value = AdviceKind.OBTAINABILITY, scores.obtainability
                yield _advice(zone, instance_type, kind, value, now_ms, now_ms, now_ms, ADVICE)
            hours = hours_of(scores.estimated_uptime)
            if hours is not None:
                kind = AdviceKind.UPTIME_HOURS
                yield _advice(zone, instance_type, kind, hours, now_ms, now_ms, now_ms, ADVICE)


def _history_request(compute: Any, zone: str, instance_type: str) -> Any:
    return compute.CapacityHistoryRequest(
        types=["PRICE", "PREEMPTION"],
        instance_properties=compute.CapacityHistoryRequestInstanceProperties(
            machine_type=instance_type,
            scheduling=compute.CapacityHistoryRequestInstancePropertiesScheduling(provisioning_model="SPOT"),
        ),
        location_policy=compute.CapacityHistoryRequestLocationPolicy(location=f"zones/{zone}"),
    )


def _advice_request(compute: Any, zone: str, instance_type: str, size: int) -> Any:
    selection = compute.CapacityAdviceRequestInstanceFlexibilityPolicyInstanceSelection(machine_types=[instance_type])
    return compute.CapacityAdviceRequest(
        size=size,
        instance_properties=compute.CapacityAdviceRequestInstanceProperties(
            scheduling=compute.CapacityAdviceRequestInstancePropertiesScheduling(provisioning_model="SPOT")
        ),
        instance_flexibility_policy=compute.CapacityAdviceRequestInstanceFlexibilityPolicy(
            instance_selections={"this": selection}
        ),
        distribution_policy=compute.CapacityAdviceRequestDistributionPolicy(
            target_shape="ANY_SINGLE_ZONE",
            zones=[compute.CapacityAdviceRequestDistributionPolicyZoneConfiguration(zone=f"zones/{zone}")],
        ),
    )


def _spot_price(zone: str, instance_type: str, record: Any) -> RawPrice:
    return RawPrice(
        cloud="gcp",
        region=region_of(zone),
        zone=zone,
        zone_id="",
        instance_type=instance_type,
        market=Market.SPOT,
        price=_money(record.list_price.units, record.list_price.nanos),
        currency=record.list_price.currency_code,
        unit="hour",
        effective=record.interval.start_time,
        source=ADVICE_HISTORY,
        source_id=f"{instance_type}@{zone}",
    )


def _advice(
    zone: str, instance_type: str, kind: AdviceKind, value: float, from_ms: int, until_ms: int, now_ms: int, source: str
) -> CapacityAdvice:
    return CapacityAdvice(
        cloud="gcp",
        region=region_of(zone),
        zone=zone,
        instance_type=instance_type,
        kind=kind,
        value=value,
        from_ms=from_ms,
        until_ms=until_ms,
        observed_ms=now_ms,
        source=source,
    )


def region_of(zone: str) -> str:
    """Return the region of a zone: `us-central1` of `us-central1-a`."""
    return zone.rpartition("-")[0]


def hours_of(text: str) -> float | None:
    """Convert one of Google's durations, such as `36000s`, to hours; None for any other text."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)s", text.strip())
    return float(found[1]) * 1000 / HOUR_MS if found else None


class _Access:
    """Endpoint, credentials and time limits of the queries."""

    def __init__(self, environ: Mapping[str, str], endpoint: str, patience: Patience) -> None:
        self._environ, self._endpoint, self._patience = environ, environ.get(endpoint, ""), patience

    def options(self) -> dict[str, Any]:
        if self._endpoint:
            from google.auth.credentials import AnonymousCredentials

            return {"credentials": AnonymousCredentials(), "client_options": {"api_endpoint": self._endpoint}}
        return {"credentials": self._credentials()[0]}

    def project(self) -> str:
        named = self._environ.get(PROJECT, "")
        project = named or ("" if self._endpoint else self._credentials()[1] or "")
        if not project:
            raise MissingCredentials(
                f"Google Cloud's capacity advisor is asked on behalf of a project, and none is named; set {PROJECT}, "
                "or `gcloud auth application-default set-quota-project PROJECT`"
            )
        return project

    def limits(self) -> dict[str, Any]:
        from google.api_core import exceptions, retry

        def passes(error: Exception) -> bool:
            return retry.if_transient_error(error) or isinstance(error, exceptions.ServerError)

        again = retry.Retry(predicate=passes, initial=0.5, maximum=10.0, timeout=self._patience.seconds)
        return {"retry": again, "timeout": self._patience.seconds}

    def _credentials(self) -> tuple[Any, str | None]:
        import google.auth

        credentials, project = google.auth.default(scopes=["https://www.googleapis.com/auth/cloud-platform"])
        return credentials, project


@contextmanager
def _said(what: str) -> Iterator[None]:
    """Translate the client's errors into the launcher's errors."""
    try:
        from google.api_core import exceptions
        from google.auth import exceptions as auth
        from google.protobuf.json_format import ParseError
    except ModuleNotFoundError:
        raise not_installed("google-cloud-billing or google-cloud-compute") from None
    try:
        yield
    except Failure:
        raise
    except ModuleNotFoundError as error:
        raise not_installed(error.name or "a client of Google Cloud") from None
    except auth.DefaultCredentialsError:
        raise MissingCredentials(_who("Google Cloud found no credentials")) from None
    except (auth.RefreshError, exceptions.Unauthorized, exceptions.Forbidden) as error:
        raise MissingCredentials(_who(f"{what}: Google Cloud refused ({error})")) from None
    except exceptions.RetryError as error:
        raise SourceFailed(
            f"{what}: Google Cloud kept refusing ({error.cause}) and the client gave up; try again in a minute, "
            "or ask for fewer regions"
        ) from None
    except (exceptions.GoogleAPIError, auth.GoogleAuthError, OSError) as error:
        raise SourceFailed(
            f"{what}: Google Cloud did not answer as it should ({error}); check the network, then try again"
        ) from None
    except ParseError as error:
        raise SourceFailed(f"{what}: Google Cloud's answer cannot be read ({error}); try again later") from None


def _who(found: str) -> str:
    return (
        f"{found}. `gcloud auth application-default login` makes some, or GOOGLE_APPLICATION_CREDENTIALS names a key "
        f"file; {NEEDS}"
    )
