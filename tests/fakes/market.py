"""A fake market: an HTTP server that answers like AWS and Google Cloud and replays a price and capacity trace.

EC2 query API (DescribeSpotPriceHistory, DescribeRegions, DescribeAvailabilityZones), the price list's JSON API
(GetProducts), Cloud Billing v1 (skus), Compute v1 (machine types, advice.capacity, advice.capacityHistory). Shipped
clients talk to it unmodified, through the endpoint settings in `environ`. A test sets faults beforehand:
`fail("ec2", Fault.THROTTLED, times=2)`. Text of a row is sent unchanged, so a test writes a malformed price, time or
currency into the trace or a SKU.

The fake has no quotas, signatures or accounts, and its prices are those of the trace.
"""

import json
import re
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from csv import DictReader
from dataclasses import dataclass, field
from datetime import UTC, datetime
from enum import StrEnum
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit
from xml.sax.saxutils import escape
from zlib import crc32

from launcher.market.prices import time_ms

PROJECT = "fake-project"

EC2, PRICING, BILLING, COMPUTE = "ec2", "pricing", "billing", "compute"


@dataclass(frozen=True, kw_only=True, slots=True)
class Tick:
    """One entry of a trace: the price of a pool from then on, and its number of instances."""

    at_ms: int
    cloud: str
    region: str
    zone: str
    instance_type: str
    usd: str | None
    """The price text as sent; None: the row has no price."""
    capacity: int = 1
    at: str | None = None
    """A time text that is sent instead of `at_ms`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Product:
    """One on-demand price of AWS's price list."""

    region: str
    instance_type: str
    usd: str
    currency: str = "USD"
    unit: str = "Hrs"
    effective: str = "2025-11-01T00:00:00Z"
    marketoption: str = "OnDemand"

    def attributes(self) -> dict[str, str]:
        return {
            "instanceType": self.instance_type,
            "regionCode": self.region,
            "operatingSystem": "Linux",
            "tenancy": "Shared",
            "preInstalledSw": "NA",
            "capacitystatus": "Used",
            "marketoption": self.marketoption,
            "locationType": "AWS Region",
        }

    def text(self) -> str:
        sku = f"SKU{crc32(repr(self).encode())}"
        dimension = {
            "unit": self.unit,
            "rateCode": f"{sku}.TERM.6YS6EN2CT7",
            "pricePerUnit": {self.currency: self.usd},
        }
        term = {"effectiveDate": self.effective, "priceDimensions": {"a": dimension}}
        product = {"sku": sku, "productFamily": "Compute Instance", "attributes": self.attributes()}
        return json.dumps({"product": product, "serviceCode": "AmazonEC2", "terms": {"OnDemand": {"t": term}}})


def sku(
    description: str,
    usd: str,
    regions: Sequence[str],
    *,
    unit: str = "h",
    usage: str = "OnDemand",
    sku_id: str = "",
    currency: str = "USD",
    effective: str = "2025-11-20T10:00:00Z",
) -> dict[str, Any]:
    """Return a SKU of the billing catalog in the form of its REST API."""
    units, _, nanos = usd.partition(".")
    price = {"currencyCode": currency, "units": units, "nanos": int((nanos + "000000000")[:9])}
    return {
        "name": f"services/6F81-5844-456A/skus/{sku_id or description}",
        "skuId": sku_id or re.sub(r"\W+", "-", description)[:40],
        "description": description,
        "category": {"serviceDisplayName": "Compute Engine", "resourceFamily": "Compute", "usageType": usage},
        "serviceRegions": list(regions),
        "pricingInfo": [
            {
                "effectiveTime": effective,
                "pricingExpression": {
                    "usageUnit": unit,
                    "tieredRates": [{"startUsageAmount": 0, "unitPrice": price}],
                },
            }
        ],
        "serviceProviderName": "Google",
    }


class Fault(StrEnum):
    """The faulty answer of a service."""

    THROTTLED = "throttled"
    BROKEN = "broken"
    DENIED = "denied"
    GARBLED = "garbled"


@dataclass
class FakeMarket:
    """A server that runs until `close`; a context manager. `now_ms` is the clock that a test moves."""

    ticks: Sequence[Tick] = ()
    products: Sequence[Product | str] = ()
    skus: Sequence[Mapping[str, Any]] = ()
    preemption_rates: Mapping[tuple[str, str], float] = field(default_factory=dict)
    """Preemption rates by zone and machine type, each of the day before now."""
    now_ms: int = 0
    page: int = 1000
    with_zone_ids: bool = True
    """Whether a spot price names its zone's id, as newer EC2 does."""
    calls: Counter[str] = field(default_factory=Counter)
    """Number of calls of each action, including faults."""

    def __post_init__(self) -> None:
        self._faults: defaultdict[str, list[Fault]] = defaultdict(list)
        self._earlier_queries: dict[object, list[Tick]] = {}
        self._lock = threading.Lock()
        market = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                market._answer(self, "GET")

            def do_POST(self) -> None:
                market._answer(self, "POST")

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)
        self._thread.start()

    def __enter__(self) -> "FakeMarket":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"

    @property
    def environ(self) -> dict[str, str]:
        """Return the environment variables that the shipped clients read."""
        return {
            "AWS_ENDPOINT_URL_EC2": self.url,
            "AWS_ENDPOINT_URL_PRICING": self.url,
            "AWS_ACCESS_KEY_ID": "fake",
            "AWS_SECRET_ACCESS_KEY": "fake",
            "AWS_EC2_METADATA_DISABLED": "true",
            "SPOTRL_GCP_BILLING_ENDPOINT": self.url,
            "SPOTRL_GCP_COMPUTE_ENDPOINT": self.url,
            "GOOGLE_CLOUD_PROJECT": PROJECT,
        }

    def fail(self, service: str, fault: Fault, times: int = 1) -> None:
        """Make the next `times` answers of a service this fault."""
        with self._lock:
            self._faults[service] += [fault] * times

    # --- HTTP

    def _answer(self, http: BaseHTTPRequestHandler, method: str) -> None:
        body = http.rfile.read(int(http.headers.get("Content-Length") or 0)).decode()
        path = urlsplit(http.path)
        if "X-Amz-Target" in http.headers:
            service, action = PRICING, http.headers["X-Amz-Target"].rpartition(".")[2]
            answer: Callable[[], str] = partial(self._products, body)
        elif path.path.startswith("/v1/services/"):
            service, action = BILLING, "skus"
            answer = partial(self._skus, path.query)
        elif path.path.startswith("/compute/v1/"):
            service, action = COMPUTE, path.path.rpartition("/")[2]
            answer = partial(self._compute, path.path, path.query, body)
        else:
            query = {key: values[0] for key, values in parse_qs(body, keep_blank_values=True).items()}
            service, action = EC2, query.get("Action", "")
            answer = partial(self._ec2, query, _region_of(http.headers.get("Authorization", "")))
        with self._lock:
            self.calls[action] += 1
            fault = self._faults[service].pop(0) if self._faults[service] else None
        status, text = (200, answer()) if fault is None else _fault(service, fault)
        data = text.encode()
        http.send_response(status)
        http.send_header("Content-Type", "text/xml" if service == EC2 else "application/json")
        http.send_header("Content-Length", str(len(data)))
        http.end_headers()
        http.wfile.write(data)

    # --- AWS

    def _ec2(self, query: Mapping[str, str], region: str) -> str:
        match query["Action"]:
            case "DescribeRegions":
                names = sorted({tick.region for tick in self.ticks if tick.cloud == "aws"})
                items = "".join(f"<item><regionName>{escape(name)}</regionName></item>" for name in names)
                return _xml("DescribeRegions", f"<regionInfo>{items}</regionInfo>")
            case "DescribeAvailabilityZones":
                zones = sorted({t.zone for t in self.ticks if (t.cloud, t.region) == ("aws", region)})
                named = (f"<zoneName>{escape(zone)}</zoneName><zoneId>{zone_id(zone)}</zoneId>" for zone in zones)
                items = "".join(f"<item>{zone}</item>" for zone in named)
                return _xml("DescribeAvailabilityZones", f"<availabilityZoneInfo>{items}</availabilityZoneInfo>")
            case "DescribeSpotPriceHistory":
                return self._spot_history(query, region)
            case other:
                raise ValueError(f"the fake market does not know {other}")

    def _spot_history(self, query: Mapping[str, str], region: str) -> str:
        types = _filter_values(query, "instance-type")
        since_ms = time_ms(query["StartTime"]) if "StartTime" in query else 0
        ticks = self._aws_ticks(region, frozenset(types), since_ms or 0)
        rows, token = _page(ticks, query.get("NextToken", ""), int(query.get("MaxResults", self.page)), self.page)
        items = "".join(self._spot_item(tick) for tick in rows)
        return _xml(
            "DescribeSpotPriceHistory",
            f"<spotPriceHistorySet>{items}</spotPriceHistorySet><nextToken>{token}</nextToken>",
        )

    def _spot_item(self, tick: Tick) -> str:
        fields = {
            "instanceType": tick.instance_type,
            "productDescription": "Linux/UNIX",
            "spotPrice": tick.usd,
            "timestamp": _time(tick),
            "availabilityZone": tick.zone,
            "availabilityZoneId": zone_id(tick.zone) if self.with_zone_ids else None,
        }
        parts = "".join(f"<{name}>{escape(value)}</{name}>" for name, value in fields.items() if value is not None)
        return f"<item>{parts}</item>"

    def _aws_ticks(self, region: str, types: frozenset[str], since_ms: int) -> list[Tick]:
        """Return prices newest first like EC2: every change since then, and the price current at that time."""
        question = (region, types, since_ms, self.now_ms)
        if question not in self._earlier_queries:  # the next page of the same query
            held: dict[tuple[str, str], Tick] = {}
            changes = []
            for tick in sorted(self.ticks, key=lambda tick: tick.at_ms):
                is_wanted = (tick.cloud, tick.region) == ("aws", region) and (not types or tick.instance_type in types)
                if not is_wanted or tick.at_ms > self.now_ms:
                    continue
                if tick.at_ms <= since_ms:
                    held[tick.zone, tick.instance_type] = tick
                else:
                    changes.append(tick)
            self._earlier_queries[question] = [*reversed(changes), *held.values()]
        return self._earlier_queries[question]

    def _products(self, body: str) -> str:
        query = json.loads(body)
        wanted = {one["Field"]: one["Value"] for one in query.get("Filters", [])}

        def fits(product: Product | str) -> bool:
            if isinstance(product, str):  # broken on purpose: sent to every caller
                return True
            attributes = product.attributes()
            return all(attributes.get(name) == value for name, value in wanted.items())

        fitting = [product for product in self.products if fits(product)]
        rows, token = _page(fitting, query.get("NextToken", ""), 100, self.page)
        texts = [row if isinstance(row, str) else row.text() for row in rows]
        return json.dumps({"FormatVersion": "aws_v1", "PriceList": texts} | ({"NextToken": token} if token else {}))

    # --- Google Cloud

    def _skus(self, query: str) -> str:
        fields = {key: values[0] for key, values in parse_qs(query).items()}
        rows, token = _page(self.skus, fields.get("pageToken", ""), int(fields.get("pageSize", 5000)), self.page)
        return json.dumps({"skus": list(rows), "nextPageToken": token})

    def _compute(self, path: str, query: str, body: str) -> str:
        if path.endswith("/aggregated/machineTypes"):
            return self._machine_types(re.findall(r'name = "([^"]+)"', parse_qs(query).get("filter", [""])[0]))
        request = json.loads(body)
        if path.endswith("/advice/capacityHistory"):
            zone = request["locationPolicy"]["location"].rpartition("/")[2]
            return self._capacity_history(zone, request["instanceProperties"]["machineType"])
        zone = request["distributionPolicy"]["zones"][0]["zone"].rpartition("/")[2]
        selection = next(iter(request["instanceFlexibilityPolicy"]["instanceSelections"].values()))
        return self._capacity(zone, selection["machineTypes"][0], request["size"])

    def _machine_types(self, names: Sequence[str]) -> str:
        zones: defaultdict[str, set[str]] = defaultdict(set)
        for tick in self.ticks:
            if tick.cloud == "gcp" and tick.instance_type in names:
                zones[tick.zone].add(tick.instance_type)
        items = {
            f"zones/{zone}": {"machineTypes": [{"name": name, "zone": zone} for name in sorted(found)]}
            for zone, found in zones.items()
        }
        return json.dumps({"id": "fake", "items": items})

    def _capacity_history(self, zone: str, machine_type: str) -> str:
        ticks = [t for t in self.ticks if (t.zone, t.instance_type) == (zone, machine_type) and t.at_ms <= self.now_ms]
        prices = []
        for tick in sorted(ticks, key=lambda tick: tick.at_ms):
            units, _, nanos = (tick.usd or "").partition(".")
            money = {"currencyCode": "USD", "units": units, "nanos": int((nanos + "000000000")[:9])} if tick.usd else {}
            prices.append({"interval": {"startTime": _time(tick)}, "listPrice": money})
        rate = self.preemption_rates.get((zone, machine_type))
        day = {"startTime": iso(self.now_ms - 86_400_000), "endTime": iso(self.now_ms)}
        rates = [] if rate is None else [{"interval": day, "preemptionRate": rate}]
        return json.dumps(
            {
                "location": f"{self.url}/compute/v1/projects/{PROJECT}/zones/{zone}",
                "machineType": machine_type,
                "priceHistory": prices,
                "preemptionHistory": rates,
            }
        )

    def _capacity(self, zone: str, machine_type: str, size: int) -> str:
        """Return the advice from the trace: half of the requested capacity has odds of one half."""
        ticks = [t for t in self.ticks if (t.zone, t.instance_type) == (zone, machine_type) and t.at_ms <= self.now_ms]
        there = max(ticks, key=lambda tick: tick.at_ms).capacity if ticks else 0
        scores = {"obtainability": min(1.0, there / size), "estimatedUptime": f"{3600 * max(1, there)}s"}
        shard = {"zone": zone, "machineType": machine_type, "instanceCount": size, "provisioningModel": "SPOT"}
        return json.dumps({"recommendations": [{"scores": scores, "shards": [shard]}]})


# --- reading and writing -----------------------------------------------------------------------------


def read_trace(lines: Iterable[str], origin_ms: int) -> list[Tick]:
    """Read CSV with the columns `t_s,cloud,region,zone,instance_type,capacity,spot_usd_per_hour`."""
    return [
        Tick(
            at_ms=origin_ms + round(float(row["t_s"]) * 1000),
            cloud=row["cloud"],
            region=row["region"],
            zone=row["zone"],
            instance_type=row["instance_type"],
            capacity=int(row["capacity"]),
            usd=row["spot_usd_per_hour"],
        )
        for row in DictReader(lines)
    ]


def iso(at_ms: int) -> str:
    return datetime.fromtimestamp(at_ms / 1000, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def zone_id(zone: str) -> str:
    """Return an id made from the zone name: `us-east-1a` is `use1-aza`."""
    parts = zone[:-1].split("-")
    return f"{parts[0]}{parts[1][0]}{parts[2]}-az{zone[-1]}" if len(parts) == 3 else zone


def _time(tick: Tick) -> str:
    return iso(tick.at_ms) if tick.at is None else tick.at


def _page(rows: Sequence[Any], token: str, size: int, at_most: int) -> tuple[Sequence[Any], str]:
    """Return the rows from `token` on, and the token of the next page; empty at the end."""
    begin = int(token or 0)
    end = begin + min(size, at_most)
    return rows[begin:end], str(end) if end < len(rows) else ""


def _region_of(authorization: str) -> str:
    """Return the region from the credential's scope: `Credential=KEY/20251121/us-east-1/ec2/aws4_request`."""
    found = re.search(r"Credential=[^/]+/\d+/([^/]+)/", authorization)
    return found[1] if found else ""


def _filter_values(query: Mapping[str, str], name: str) -> set[str]:
    number = next((key.split(".")[1] for key, value in query.items() if key.endswith(".Name") and value == name), None)
    return {value for key, value in query.items() if key.startswith(f"Filter.{number}.Value.")}


def _xml(action: str, inner: str) -> str:
    space = "http://ec2.amazonaws.com/doc/2016-11-15/"
    whole = f"<requestId>fake</requestId>{inner}"
    return f'<?xml version="1.0"?><{action}Response xmlns="{space}">{whole}</{action}Response>'


def _fault(service: str, fault: Fault) -> tuple[int, str]:
    if fault is Fault.GARBLED:
        return 200, "<not what you asked for"
    status, code, google = {
        Fault.THROTTLED: (503, "RequestLimitExceeded", 429),
        Fault.BROKEN: (500, "InternalError", 500),
        Fault.DENIED: (403, "UnauthorizedOperation", 403),
    }[fault]
    message = f"the fake market is {fault.value}"
    if service == EC2:
        error = f"<Errors><Error><Code>{code}</Code><Message>{message}</Message></Error></Errors>"
        return status, f"<Response>{error}<RequestID>fake</RequestID></Response>"
    if service == PRICING:
        kinds = {Fault.THROTTLED: "ThrottlingException", Fault.DENIED: "AccessDeniedException"}
        kind = kinds.get(fault, "InternalErrorException")
        return (400 if fault in kinds else 500), json.dumps({"__type": kind, "message": message})
    return google, json.dumps({"error": {"code": google, "message": message, "status": fault.name}})
