"""Google Cloud's prices: instances added up from the billing catalog's parts, and the capacity advisor's estimates.

billing SKUs -> parts (core, memory, GPU, local SSD) -> one price per instance type, region and market
capacity advisor -> spot price history of a zone, preemption rate, obtainability, expected uptime

`SPOTRL_GCP_BILLING_ENDPOINT` and `SPOTRL_GCP_COMPUTE_ENDPOINT` name another server (a test's, a proxy's). No
credentials are sent to another server. The catalog prices no instance. A sum with a missing or unclear part is reported
and refused. Traps in real catalogs: calendar-mode and DWS rates that look like on-demand, spot
SKUs of B200 filed as OnDemand, A3 Ultra hosts with SKUs of their own, A4 sold whole.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from engine.events import Market
from launcher.exit_codes import Failure
from launcher.market.instance_types import InstanceType
from launcher.market.prices import AdviceKind, CapacityAdvice, Fetched, RawPrice, time_ms
from launcher.market.sources.asking import MissingCredentials, Patience, SourceFailed, ask_all, not_installed
from launcher.market.sources.gcp_catalog import CATALOG, NEEDS, assemble, price_text, region_of, sku_of_message
from launcher.money import HOUR_MS

ADVICE_HISTORY = "gcp compute advice.capacityHistory"
ADVICE = "gcp compute advice.capacity"

COMPUTE_ENGINE = "services/6F81-5844-456A"
PAGE = 5000

BILLING_ENDPOINT = "SPOTRL_GCP_BILLING_ENDPOINT"
COMPUTE_ENDPOINT = "SPOTRL_GCP_COMPUTE_ENDPOINT"
PROJECT = "GOOGLE_CLOUD_PROJECT"


class GcpCatalog:
    """Instance prices per region, added up from the public billing catalog. Empty `regions`: all regions."""

    name, cloud, gives_prices = CATALOG, "gcp", True

    def __init__(
        self,
        instance_types: Sequence[InstanceType],
        *,
        environ: Mapping[str, str],
        regions: Sequence[str] = (),
        patience: Patience | None = None,
    ) -> None:
        self._machines, self._regions = tuple(instance_types), tuple(regions)
        self._access = _Access(environ, BILLING_ENDPOINT, patience or Patience())

    def fetch(self, now_ms: int) -> Fetched:
        with _errors_named(self.name):
            from google.cloud import billing_v1

            client = billing_v1.CloudCatalogClient(transport="rest", **self._access.options())
            request = billing_v1.ListSkusRequest(parent=COMPUTE_ENGINE, page_size=PAGE)
            pages = client.list_skus(request=request, **self._access.limits()).pages
            # Read the bare message: through the wrapper, reading all SKUs takes twice as long.
            skus = [sku_of_message(sku) for page in pages for sku in billing_v1.ListSkusResponse.pb(page).skus]
        if not skus:
            return Fetched()
        return assemble(skus, self._machines, self._regions)


class GcpAdvice:
    """Capacity advice per zone: spot prices of the last weeks, preemption rates, odds of `size` instances now.

    Compute Engine has no history of N1 instances with attached GPUs, so N1 types are not queried.
    """

    name, cloud, gives_prices = ADVICE_HISTORY, "gcp", False

    def __init__(
        self,
        instance_types: Sequence[InstanceType],
        *,
        environ: Mapping[str, str],
        regions: Sequence[str] = (),
        size: int = 1,
        patience: Patience | None = None,
    ) -> None:
        self._types = tuple(m.instance_type for m in instance_types if m.instance_type == m.machine_type)
        self._regions, self._size = tuple(regions), size
        self._access = _Access(environ, COMPUTE_ENDPOINT, patience or Patience())

    def fetch(self, now_ms: int) -> Fetched:
        if not self._types:
            return Fetched(notes=(f"{self.name}: not asked, it knows no N1 machine with a GPU",))
        with _errors_named(self.name):
            from google.cloud import compute_v1

            project = self._access.project()
            client = compute_v1.AdviceClient(**self._access.options())
            pools = self._pools(compute_v1, project)
        answers, failures = ask_all(pools, lambda pool: self._of_pool(compute_v1, client, project, pool, now_ms))
        return Fetched(
            prices=tuple(answer for answer in answers if isinstance(answer, RawPrice)),
            advice=tuple(answer for answer in answers if isinstance(answer, CapacityAdvice)),
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
        with _errors_named(f"{ADVICE_HISTORY}, {instance_type} in {zone}"):
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
        price=price_text(record.list_price.units, record.list_price.nanos),
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


def hours_of(text: str) -> float | None:
    """Convert one of Google's durations, such as `36000s`, to hours; None for any other text."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)s", text.strip())
    return float(match[1]) * 1000 / HOUR_MS if match else None


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
def _errors_named(operation: str) -> Iterator[None]:
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
        raise MissingCredentials(_who(f"{operation}: Google Cloud refused ({error})")) from None
    except exceptions.RetryError as error:
        raise SourceFailed(
            f"{operation}: Google Cloud kept refusing ({error.cause}) and the client gave up; try again in a minute, "
            "or ask for fewer regions"
        ) from None
    except (exceptions.GoogleAPIError, auth.GoogleAuthError, OSError) as error:
        raise SourceFailed(
            f"{operation}: Google Cloud did not answer as it should ({error}); check the network, then try again"
        ) from None
    except ParseError as error:
        raise SourceFailed(f"{operation}: Google Cloud's answer cannot be read ({error}); try again later") from None


def _who(problem: str) -> str:
    return (
        f"{problem}. `gcloud auth application-default login` makes some, or GOOGLE_APPLICATION_CREDENTIALS names a key "
        f"file; {NEEDS}"
    )
