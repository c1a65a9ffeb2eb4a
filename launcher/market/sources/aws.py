"""AWS's prices: spot from EC2 of each region, on-demand from the price list service. Permissions: `PERMISSIONS`.

botocore chooses the endpoints (`AWS_ENDPOINT_URL_EC2`, `AWS_ENDPOINT_URL_PRICING`) and the credentials. Rows are passed
on unchanged, times included; `believe` judges the rows.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from threading import Lock
from typing import Any

from engine.events import Market
from launcher.market.prices import Fetched, RawPrice
from launcher.market.sources.asking import MissingCredentials, Patience, SourceFailed, ask_all, not_installed

SPOT = "aws ec2 DescribeSpotPriceHistory"
ON_DEMAND = "aws pricing GetProducts"

PERMISSIONS = (
    "ec2:DescribeRegions",
    "ec2:DescribeAvailabilityZones",
    "ec2:DescribeSpotPriceHistory",
    "pricing:GetProducts",
)

HOME_REGION = "us-east-1"
"""Region of the price list service, also used for the list of regions."""

PAGE = 1000

UNKNOWN_REGION = "not said"
"""Region of an unreadable product. The product is refused for any choice of regions."""

SHARED_LINUX: Mapping[str, str] = {
    "operatingSystem": "Linux",
    "tenancy": "Shared",
    "preInstalledSw": "NA",
    "capacitystatus": "Used",
    "marketoption": "OnDemand",  # without the option, capacity blocks come too, with a list price of 0
    "locationType": "AWS Region",
}

NOT_ALLOWED = frozenset(
    {
        "AccessDenied",
        "AccessDeniedException",
        "AuthFailure",
        "ExpiredToken",
        "ExpiredTokenException",
        "InvalidClientTokenId",
        "OptInRequired",
        "RequestExpired",
        "SignatureDoesNotMatch",
        "UnauthorizedOperation",
        "UnrecognizedClientException",
    }
)
"""Error codes that need a person to fix; waiting does not help."""


class AwsSpot:
    """Spot prices of every zone from `since_ms` on (AWS keeps 90 days), with the prices valid at `since_ms`.

    Empty `regions`: all enabled regions.
    """

    name, cloud, gives_prices = SPOT, "aws", True

    def __init__(
        self, types: Sequence[str], *, since_ms: int, regions: Sequence[str] = (), patience: Patience | None = None
    ) -> None:
        self._types, self._since_ms, self._regions = tuple(types), since_ms, tuple(regions)
        self._client = _clients(patience or Patience())

    def fetch(self, now_ms: int) -> Fetched:
        with _errors_named(self.name):
            regions = self._regions or enabled_regions(self._client("ec2", HOME_REGION))
        prices, failures = ask_all(regions, self._of_region)
        return Fetched(prices=tuple(prices), failures=tuple(failures))

    def _of_region(self, region: str) -> Iterator[RawPrice]:
        with _errors_named(f"{self.name}, {region}"):
            client = self._client("ec2", region)
            pages = client.get_paginator("describe_spot_price_history").paginate(
                ProductDescriptions=["Linux/UNIX"],
                # Use a filter instead of InstanceTypes: a type missing from the region is then no error.
                Filters=[{"Name": "instance-type", "Values": list(self._types)}],
                StartTime=datetime.fromtimestamp(self._since_ms / 1000, UTC),
                PaginationConfig={"PageSize": PAGE},
            )
            rows = [row for page in pages for row in page.get("SpotPriceHistory", [])]
            ids = {} if all(row.get("AvailabilityZoneId") for row in rows) else zone_ids(client)
        for row in rows:
            zone = row.get("AvailabilityZone", "")
            zone_id = row.get("AvailabilityZoneId") or ids.get(zone, "")
            yield RawPrice(
                cloud="aws",
                region=region,
                zone=zone,
                zone_id=zone_id,
                instance_type=row.get("InstanceType", ""),
                market=Market.SPOT,
                price=row.get("SpotPrice", ""),
                currency="CNY" if region.startswith("cn-") else "USD",
                unit="hour",
                effective=row.get("Timestamp", ""),
                source=SPOT,
                source_id=f"{row.get('InstanceType', '')}@{zone_id or zone}",
            )


class AwsOnDemand:
    """On-demand prices of Linux on shared hardware. Empty `regions`: all regions of the price list."""

    name, cloud, gives_prices = ON_DEMAND, "aws", True

    def __init__(self, types: Sequence[str], *, regions: Sequence[str] = (), patience: Patience | None = None) -> None:
        self._types, self._regions = tuple(types), frozenset(regions)
        self._client = _clients(patience or Patience())

    def fetch(self, now_ms: int) -> Fetched:
        prices, failures = ask_all(self._types, self._of_type)
        regions = self._regions and self._regions | {UNKNOWN_REGION}
        chosen = (price for price in prices if not regions or price.region in regions)
        return Fetched(prices=tuple(chosen), failures=tuple(failures))

    def _of_type(self, instance_type: str) -> Iterator[RawPrice]:
        with _errors_named(f"{self.name}, {instance_type}"):
            client = self._client("pricing", HOME_REGION)
            pages = client.get_paginator("get_products").paginate(
                ServiceCode="AmazonEC2",
                Filters=[
                    {"Type": "TERM_MATCH", "Field": name, "Value": value}
                    for name, value in {"instanceType": instance_type, **SHARED_LINUX}.items()
                ],
            )
            products = [product for page in pages for product in page.get("PriceList", [])]
        for product in products:
            yield from on_demand_of(product, instance_type)


def on_demand_of(product: str, instance_type: str) -> Iterator[RawPrice]:
    """Yield the on-demand prices of one product. `product`: an entry of the price list, as JSON text.

    An unreadable product becomes a row that the price checks refuse.
    """
    try:
        whole = json.loads(product)
        attributes = whole["product"]["attributes"]
        terms = whole["terms"]["OnDemand"].values()
        dimensions = [(term, row) for term in terms for row in term["priceDimensions"].values()]
        region, sku = attributes["regionCode"], whole["product"]["sku"]
    except (ValueError, KeyError, TypeError, AttributeError):
        yield _on_demand(UNKNOWN_REGION, instance_type, price=product, currency="USD", unit="Hrs", effective="", sku="")
        return
    for term, row in dimensions:
        by_currency = row.get("pricePerUnit") or {}
        currency = "USD" if "USD" in by_currency else next(iter(by_currency), "")
        yield _on_demand(
            region,
            attributes.get("instanceType", ""),
            price=by_currency.get(currency, ""),
            currency=currency,
            unit=row.get("unit", ""),
            effective=term.get("effectiveDate", ""),
            sku=row.get("rateCode", sku),
        )


def _on_demand(
    region: str, instance_type: str, *, price: str, currency: str, unit: str, effective: str, sku: str
) -> RawPrice:
    return RawPrice(
        cloud="aws",
        region=region,
        zone="",
        zone_id="",
        instance_type=instance_type,
        market=Market.ON_DEMAND,
        price=price,
        currency=currency,
        unit="hour" if unit == "Hrs" else unit,
        effective=effective,
        source=ON_DEMAND,
        source_id=sku,
    )


def enabled_regions(client: Any) -> tuple[str, ...]:
    """Return every region that the account may use."""
    return tuple(sorted(region["RegionName"] for region in client.describe_regions()["Regions"]))


def zone_ids(client: Any) -> dict[str, str]:
    """Return zone ids by zone name, as this account names the zones of the client's region."""
    return {zone["ZoneName"]: zone["ZoneId"] for zone in client.describe_availability_zones()["AvailabilityZones"]}


def _clients(patience: Patience) -> Callable[[str, str], Any]:
    """Return a function that makes clients by service and region, one at a time.

    A boto3 session is not safe for two threads, but the clients of a session are.
    """
    lock = Lock()
    cached: dict[tuple[str, str], Any] = {}
    sessions: list[Any] = []

    def client(service: str, region: str) -> Any:
        try:
            from botocore.config import Config
        except ModuleNotFoundError:
            raise not_installed("boto3") from None
        with lock:
            if not sessions:
                sessions.append(_session())
            if (service, region) not in cached:
                cached[service, region] = sessions[0].client(
                    service,
                    region_name=region,
                    config=Config(
                        retries={"mode": "standard", "total_max_attempts": patience.attempts},
                        connect_timeout=5,
                        read_timeout=patience.seconds,
                    ),
                )
            return cached[service, region]

    return client


def _session() -> Any:
    import boto3
    import botocore.session

    core = botocore.session.get_session()
    # Keep times as text: an unreadable time then costs a single row, not the whole page.
    core.get_component("response_parser_factory").set_parser_defaults(timestamp_parser=str)
    session = boto3.session.Session(botocore_session=core)
    if session.get_credentials() is None:
        raise MissingCredentials(_who("AWS found no credentials"))
    return session


def _who(problem: str) -> str:
    return (
        f"{problem}. `aws configure` or `aws sso login` makes some, AWS_PROFILE or AWS_ACCESS_KEY_ID and "
        f"AWS_SECRET_ACCESS_KEY name them; prices need the permissions {', '.join(PERMISSIONS)}"
    )


@contextmanager
def _errors_named(operation: str) -> Iterator[None]:
    """Translate the client's errors into the launcher's errors."""
    try:
        from botocore import exceptions as aws
        from botocore.parsers import ResponseParserError
    except ModuleNotFoundError:
        raise not_installed("boto3") from None
    try:
        yield
    except aws.ClientError as error:
        code = error.response.get("Error", {}).get("Code", "")
        message = error.response.get("Error", {}).get("Message", "")
        if code in NOT_ALLOWED:
            raise MissingCredentials(_who(f"{operation}: AWS refused ({code}: {message})")) from None
        raise SourceFailed(
            f"{operation}: AWS kept answering {code} ({message}) and the client gave up; try again in a minute, "
            "or ask for fewer regions"
        ) from None
    except (
        aws.NoCredentialsError,
        aws.PartialCredentialsError,
        aws.CredentialRetrievalError,
        aws.TokenRetrievalError,
        aws.SSOError,
        aws.ProfileNotFound,
    ) as error:
        raise MissingCredentials(_who(f"{operation}: {error}")) from None
    except (aws.BotoCoreError, ResponseParserError) as error:
        raise SourceFailed(
            f"{operation}: AWS did not answer as it should ({error}); check the network, then try again"
        ) from None
