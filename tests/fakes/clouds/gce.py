"""Google Cloud: our own partial Compute Engine, IAM, Resource Manager and token endpoint.

It answers only the calls of SkyPilot's provisioner and google-cloud-compute; any other is answered 404 and logged.
Resources are stored as the JSON of the API. A changing call returns a running operation; the next query finds it done,
with its error if any. A lack of capacity is reported there, like by the real API.

Tokens are not checked: any is accepted.
"""

import json
import re
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from ipaddress import IPv4Network
from typing import Any
from urllib.parse import urlencode

from tests.fakes.clouds import addresses
from tests.fakes.clouds.addresses import PROJECT
from tests.fakes.clouds.faults import Faults, Kind, later
from tests.fakes.clouds.hosts import HostSpec
from tests.fakes.clouds.network import Allow
from tests.fakes.clouds.prices import INSTANCE_TYPES

ROOT = f"https://www.googleapis.com/compute/v1/projects/{PROJECT}"
CLIENT_EMAIL = f"tester@{PROJECT}.iam.gserviceaccount.com"
PREEMPTED = "compute.instances.preempted"
Json = dict[str, Any]

REFUSALS = {
    "ZONE_RESOURCE_POOL_EXHAUSTED": "The zone 'projects/{project}/zones/{zone}' does not have enough resources "
    "available to fulfill the request.  Try a different zone, or try again later.",
    "QUOTA_EXCEEDED": "Quota '{metric}' exceeded.  Limit: {limit:.1f} in region {region}.",
}
QUOTAS = {
    "CPUS": 256.0,
    "PREEMPTIBLE_CPUS": 256.0,
    "N2_CPUS": 256.0,
    "DISKS_TOTAL_GB": 65536.0,
    "SSD_TOTAL_GB": 65536.0,
    "IN_USE_ADDRESSES": 64.0,
    "INSTANCES": 256.0,
    "NVIDIA_L4_GPUS": 16.0,
    "PREEMPTIBLE_NVIDIA_L4_GPUS": 16.0,
    "NVIDIA_T4_GPUS": 16.0,
    "PREEMPTIBLE_NVIDIA_T4_GPUS": 16.0,
    "NVIDIA_H100_GPUS": 16.0,
    "PREEMPTIBLE_NVIDIA_H100_GPUS": 16.0,
}
KNOWN = {kind.instance_type: kind for kind in INSTANCE_TYPES if kind.cloud == "gcp"}
ACCELERATORS = {"nvidia-l4": 8, "nvidia-tesla-t4": 4, "nvidia-h100-80gb": 8}


UNAUTHENTICATED = (
    "Request had invalid authentication credentials. Expected OAuth 2 access token, login cookie or other valid "
    "authentication credential. See https://developers.google.com/identity/sign-in/web/devconsole-project."
)
FORBIDDEN = (
    "Location ZONE:{zone} violates constraint constraints/gcp.resourceLocations on the resource "
    f"projects/{PROJECT}/zones/{{zone}}/instances/{{name}}."
)
INTERNAL_ERROR = {
    "code": "INTERNAL_ERROR",
    "message": "Internal error. Please try again or contact Google Support. (Code: '-1234567890')",
}
NODE_TOKEN = "fake-token-of-"
"""Beginning of the tokens of instances' service accounts."""


class Refused(Exception):
    """An answer that is not 2xx."""

    def __init__(self, status: int, reason: str, message: str) -> None:
        super().__init__(message)
        self.status, self.reason = status, reason


class LostReply(Exception):
    """The call was carried out, and the reply is lost."""


@dataclass
class Gce:
    faults: Faults
    pool: addresses.Pool
    market: Callable[[str, str, bytes], bytes]
    say: Callable[[str], None]
    resources: dict[tuple[str, str, str], Json] = field(default_factory=dict)
    """Resources by scope (`global`, `regions/R`, `zones/Z`), collection and name."""
    accounts: dict[str, Json] = field(default_factory=dict)
    roles: dict[str, Json] = field(default_factory=dict)
    policy: Json = field(default_factory=lambda: {"version": 1, "etag": "BwA", "bindings": []})
    account_policies: dict[str, Json] = field(default_factory=dict)
    quotas: dict[str, dict[str, float]] = field(default_factory=dict)
    preempted: dict[str, str] = field(default_factory=dict)
    """Time of the end of each instance under notice, by id."""
    ended: list[Json] = field(default_factory=list)
    ended_ms: dict[str, int] = field(default_factory=dict)
    """End of the bill of each instance that has stopped or was deleted, by id (UTC)."""
    ended_at: dict[str, float] = field(default_factory=dict)
    """Monotonic seconds at which an instance was deleted, by id."""
    quota_lag_s: float = 0.0
    """Seconds for which an ended instance still counts against quotas."""
    notice_s: float = 30.0
    """Seconds between the notice of a simulated maintenance event and the end of a Spot VM."""
    booting: dict[str, bool] = field(default_factory=dict)
    calls: dict[str, int] = field(default_factory=dict)
    counter: int = 1_000_000_000_000_000_000
    lock: threading.RLock = field(default_factory=threading.RLock)
    cloud: str = "gcp"

    def __post_init__(self) -> None:
        self.quotas = {region.name: dict(QUOTAS) for region in addresses.regions_of("gcp")}
        self._add_account("tester", {"displayName": "the client's own"})
        self._put("global", "networks", {"name": "default", "autoCreateSubnetworks": True})
        for region in addresses.regions_of("gcp"):
            self._subnetwork(region.name, "default", "default", str(region.private))
        inside = [{"IPProtocol": "tcp", "ports": ["0-65535"]}, {"IPProtocol": "udp", "ports": ["0-65535"]}]
        for name, sources, allowed in (
            ("default-allow-internal", "10.128.0.0/9", [*inside, {"IPProtocol": "icmp"}]),
            ("default-allow-ssh", "0.0.0.0/0", [{"IPProtocol": "tcp", "ports": ["22"]}]),
            ("default-allow-icmp", "0.0.0.0/0", [{"IPProtocol": "icmp"}]),
        ):
            self._firewall(
                {"name": name, "network": f"{ROOT}/global/networks/default", "sourceRanges": [sources]}
                | {"allowed": allowed, "priority": 65534}
            )

    # --- calls

    def answer(
        self, host: str, method: str, path: str, query: Mapping[str, str], raw: bytes, token: str = ""
    ) -> Json | bytes:
        """Answer one call. Raises Refused, or LostReply after carrying it out. `token`: the caller's."""
        service = host.partition(".")[0]
        if service == "www":
            service = "compute" if path.startswith("/compute/") else "oauth2"
        if service in ("openidconnect", "oauth2"):
            service = "oauth2"
        else:
            self._faulty(path)
        if is_users(token) and self.faults.met(Kind.EXPIRED, "gcp"):
            if path.endswith("/token"):
                raise Refused(400, "invalid_grant", "Token has been expired or revoked.")
            raise Refused(401, "authError", UNAUTHENTICATED)
        if service == "cloudbilling" or (
            service == "compute" and re.search(r"/advice/|/aggregated/machineTypes", path)
        ):
            return self.market(path, urlencode(query), raw)
        body = json.loads(raw) if raw[:1] in (b"{", b"[") else {}
        with self.lock:
            self.calls[service] = self.calls.get(service, 0) + 1
            match service:
                case "compute":
                    return self._compute(method, path, query, body)
                case "cloudresourcemanager":
                    return self._manager(method, path, body)
                case "iam":
                    return self._iam(method, path, body)
                case "iamcredentials" if path.endswith("/allowedLocations"):
                    return {"locations": [], "encodedLocations": "0x0"}  # an account that can be used anywhere
                case "serviceusage":
                    return {"services": []}
                case "oauth2":
                    if "tokeninfo" in path or "userinfo" in path:
                        return {"email": CLIENT_EMAIL, "expires_in": 3600, "scope": "cloud-platform"}
                    return {"access_token": "fake-token", "expires_in": 3600, "token_type": "Bearer"}
        raise _unknown(method, f"{host}{path}")

    def _faulty(self, path: str) -> None:
        found = re.search(r"/(?:zones|regions)/([a-z]+-[a-z]+\d)(-[a-z])?", path)
        where = "gcp" if found is None else f"gcp/{found[1]}" + (f"/{found[1]}{found[2]}" if found[2] else "")
        if self.faults.met(Kind.UNREACHABLE, where):
            raise LostReply
        if self.faults.met(Kind.DOWN, where):
            raise Refused(503, "backendError", "The service is currently unavailable.")
        if self.faults.met(Kind.THROTTLED, where):
            raise Refused(429, "rateLimitExceeded", "Quota exceeded for quota metric 'Queries' per minute.")

    # --- Compute Engine

    def _compute(self, method: str, path: str, query: Mapping[str, str], body: Json) -> Json:
        found = re.fullmatch(r"/compute/v1/projects/([^/]+)(?:/(.*))?", path)
        if found is None:
            raise _unknown(method, path)
        project, rest = found[1], found[2] or ""
        if not rest:
            return {"name": PROJECT, "id": "1", "commonInstanceMetadata": {"items": []}} | {
                "quotas": [
                    {"metric": "GPUS_ALL_REGIONS", "limit": 64.0, "usage": 0.0},
                    {"metric": "CPUS_ALL_REGIONS", "limit": 512.0, "usage": 0.0},
                    {"metric": "NETWORKS", "limit": 15.0, "usage": float(len(self._all("global", "networks")))},
                ]
            }
        parts = rest.split("/")
        if parts[0] == "aggregated":
            return self._aggregated(parts[1], query)
        if parts[0] == "global":
            scope, parts = "global", parts[1:]
        elif len(parts) <= 2:
            return self._place(parts[0], parts[1] if len(parts) == 2 else "", query)
        else:
            scope, parts = "/".join(parts[:2]), parts[2:]
            self._known(scope)
        collection, name, verb = (*parts, "", "")[:3]
        if collection == "images":
            return {"name": name or verb, "diskSizeGb": "10", "status": "READY", "selfLink": f"{ROOT}/{rest}"}
        if project != PROJECT:
            raise Refused(404, "notFound", f"The resource 'projects/{project}' was not found")
        if collection in ("machineTypes", "acceleratorTypes", "diskTypes"):
            return self._type(scope, collection, name)
        if collection == "instances" and name == "bulkInsert":
            return self._create_many(scope, body)
        if collection == "operations":
            return self._operations(scope, name, query)
        if method == "GET" and not name:
            return {"items": _filtered(self._all(scope, collection), query), "kind": f"compute#{collection}List"}
        if method == "POST" and not name:
            return self._create(scope, collection, body)
        if collection == "networks" and verb == "getEffectiveFirewalls":
            return {"firewalls": [f for f in self._all("global", "firewalls") if _last(f["network"]) == name]}
        thing = self._get(scope, collection, name)
        if method == "GET":
            return thing
        if method == "DELETE":
            return self._delete(scope, collection, name)
        if method in ("PATCH", "PUT"):
            thing |= body
            return self._operation(scope, "patch", thing)
        return self._change(scope, collection, thing, verb, body)

    def _place(self, kind: str, name: str, query: Mapping[str, str]) -> Json:
        zones = {zone: region for region in addresses.regions_of("gcp") for zone in region.zones}
        if kind == "zones":
            places: list[Json] = [
                {"name": zone, "status": "UP", "region": f"{ROOT}/regions/{region.name}"}
                for zone, region in zones.items()
            ]
        else:
            places = [
                {
                    "name": region.name,
                    "status": "UP",
                    "zones": [f"{ROOT}/zones/{zone}" for zone in region.zones],
                    "quotas": [
                        {"metric": metric, "limit": limit, "usage": self._used(region.name, metric)}
                        for metric, limit in self.quotas[region.name].items()
                    ],
                }
                for region in addresses.regions_of("gcp")
            ]
        places = [{**place, "selfLink": f"{ROOT}/{kind}/{place['name']}"} for place in places]
        if not name:
            return {"items": _filtered(places, query)}
        for place in places:
            if place["name"] == name:
                return place
        raise _missing(f"{kind}/{name}")

    def _used(self, region: str, metric: str) -> float:
        # A preempted instance counts until it has stopped, and longer if a test sets a quota lag.
        since = time.monotonic() - self.quota_lag_s
        counted = [i for i in self._instances() if i["status"] in ("RUNNING", "STOPPING")]
        counted += [i for i in self.ended if self.ended_at[i["id"]] > since]
        running = [i for i in counted if _region(i) == region]
        if metric in ("INSTANCES", "IN_USE_ADDRESSES"):
            return float(len(running))
        drawn = [
            _metric(
                i["machineType"],
                i.get("guestAccelerators"),
                "spot" if i["scheduling"]["provisioningModel"] == "SPOT" else "on_demand",
            )
            for i in running
        ]
        return float(sum(count for name, count in drawn if name == metric))

    def _known(self, scope: str) -> None:
        kind, _, name = scope.partition("/")
        self._place(kind, name, {})

    def _aggregated(self, collection: str, query: Mapping[str, str]) -> Json:
        scopes: dict[str, list[Json]] = {}
        for (scope, kind, _), thing in self.resources.items():
            if kind == collection and scope != "global":
                scopes.setdefault(scope, []).append(thing)
        items = {scope: {collection: kept} for scope, things in scopes.items() if (kept := _filtered(things, query))}
        return {"items": items}

    def _type(self, scope: str, collection: str, name: str) -> Json:
        if collection == "acceleratorTypes":
            kinds = [
                {"name": kind, "maximumCardsPerInstance": most, "zone": f"{ROOT}/{scope}"}
                for kind, most in ACCELERATORS.items()
            ]
            return {"items": kinds} if not name else next(kind for kind in kinds if kind["name"] == name)
        cpus = re.search(r"-(\d+)$", name)
        return {"name": name, "guestCpus": int(cpus[1]) if cpus else 8, "zone": _last(scope)}

    def _create_many(self, scope: str, body: Json) -> Json:
        names = list(body.get("perInstanceProperties") or {})
        if not names:
            names = [body["namePattern"].replace("#", str(n)) for n in range(1, int(body["count"]) + 1)]
        made = [
            self._create(scope, "instances", {**body["instanceProperties"], **per, "name": name}, lose=False)
            for name, per in ((name, (body.get("perInstanceProperties") or {}).get(name, {})) for name in names)
        ]
        self._lose(scope)
        return next((one for one in made if "_error" in self._get(scope, "operations", one["name"])), made[-1])

    def _create(self, scope: str, collection: str, body: Json, lose: bool = True) -> Json:
        name = body.get("name", "")
        if (scope, collection, name) in self.resources:
            raise Refused(409, "alreadyExists", f"The resource '{scope}/{collection}/{name}' already exists")
        match collection:
            case "instances":
                return self._insert(_last(scope), body, lose)
            case "networks":
                made = self._put(scope, collection, body)
                if body.get("autoCreateSubnetworks"):
                    for region in addresses.regions_of("gcp"):
                        self._subnetwork(region.name, name, name, str(region.private))
            case "subnetworks":
                made = self._subnetwork(_last(scope), name, _last(body["network"]), body["ipCidrRange"], body)
            case "firewalls":
                made = self._firewall(body)
            case "addresses":
                body["address"] = self.pool.take(addresses.region("gcp", _last(scope)).public)
                made = self._put(scope, collection, {**body, "status": "RESERVED"})
            case _:
                made = self._put(scope, collection, body)
        return self._operation(scope, "insert", made)

    def _insert(self, zone: str, body: Json, lose: bool) -> Json:
        region = zone.rpartition("-")[0]
        run = _run_of(body)
        if self.faults.met(Kind.FORBIDDEN, f"gcp/{region}/{zone}"):
            raise Refused(412, "conditionNotMet", FORBIDDEN.format(zone=zone, name=body["name"]))
        self._allowed("create", zone, run)
        scheduling = body.get("scheduling") or {}
        if isinstance(scheduling, list):
            scheduling = {key: value for one in scheduling for key, value in one.items()}
        _grant_notice(scheduling, is_known=self.faults.met(Kind.NO_NOTICE, f"gcp/{region}/{zone}") is None)
        market = (
            "spot" if scheduling.get("provisioningModel") == "SPOT" or scheduling.get("preemptible") else "on_demand"
        )
        self.say(f"gcp: insert {body['name']} {_last(body['machineType'])} {market} in {zone}")
        fault = self.faults.met(Kind.CAPACITY, f"gcp/{region}/{zone}", market, run=run)
        link = {"selfLink": f"{ROOT}/zones/{zone}/instances/{body['name']}", "id": self._number()}
        metric, wanted = _metric(body["machineType"], body.get("guestAccelerators"), market)
        limit = self.quotas[region].get(metric)
        if fault or (limit is not None and self._used(region, metric) + wanted > limit):
            code = (fault.code or "ZONE_RESOURCE_POOL_EXHAUSTED") if fault else "QUOTA_EXCEEDED"
            names = {"project": PROJECT, "zone": zone, "region": region, "metric": metric, "limit": limit or 0.0}
            text = REFUSALS.get(code, code).format(**names)
            return self._operation(f"zones/{zone}", "insert", link, {"code": code, "message": text})
        instance = {
            **body,
            **link,
            "status": "RUNNING",
            "zone": f"{ROOT}/zones/{zone}",
            "machineType": f"{ROOT}/zones/{zone}/machineTypes/{_last(body['machineType'])}",
            "creationTimestamp": _now(),
            "lastStartTimestamp": _now(),
            "labelFingerprint": "aA==",
            "scheduling": {"provisioningModel": "STANDARD", **scheduling},
            "tags": {"fingerprint": "aA==", **(body.get("tags") or {})},
            "metadata": {"fingerprint": "aA==", **(body.get("metadata") or {})},
            "networkInterfaces": [self._interface(region, body)],
            "disks": self._disks(zone, body),
        }
        self.resources[f"zones/{zone}", "instances", body["name"]] = instance
        made = self._operation(f"zones/{zone}", "insert", instance)
        if lose:
            self._lose(f"zones/{zone}")
        return made

    def _allowed(self, verb: str, zone: str, run: str) -> None:
        """Refuse a call about an instance if a fault denies its permission."""
        permission = f"compute.instances.{verb}"
        if self.faults.met(Kind.DENIED, f"gcp/{zone.rpartition('-')[0]}/{zone}", code=permission, run=run):
            raise Refused(403, "forbidden", f"Required '{permission}' permission for 'projects/{PROJECT}'")

    def _lose(self, scope: str) -> None:
        zone = _last(scope)
        if self.faults.met(Kind.LOST_REPLY, f"gcp/{zone.rpartition('-')[0]}/{zone}"):
            self.say("gcp: the reply to an insert is lost")
            raise LostReply

    def _interface(self, region: str, body: Json) -> Json:
        requested = (body.get("networkInterfaces") or [{}])[0]
        if requested.get("subnetwork"):
            subnetwork = self._get(f"regions/{region}", "subnetworks", _last(requested["subnetwork"]))
        else:
            wanted = _last(requested.get("network", "default"))
            within = [one for one in self._all(f"regions/{region}", "subnetworks") if _last(one["network"]) == wanted]
            if not within:
                raise _missing(f"regions/{region}/subnetworks of network {wanted}")
            subnetwork = within[0]
        interface = {
            "name": "nic0",
            "network": subnetwork["network"],
            "subnetwork": subnetwork["selfLink"],
            "networkIP": self.pool.take(IPv4Network(subnetwork["ipCidrRange"])),
        }
        if requested.get("accessConfigs"):
            nat = self.pool.take(addresses.region("gcp", region).public)
            interface["accessConfigs"] = [{"name": "External NAT", "type": "ONE_TO_ONE_NAT", "natIP": nat}]
        return interface

    def _disks(self, zone: str, body: Json) -> list[Json]:
        attached = []
        for number, disk in enumerate(body.get("disks") or [{"boot": True, "autoDelete": True}]):
            requested = disk.get("initializeParams") or {}
            name = requested.get("diskName") or (body["name"] if number == 0 else f"{body['name']}-{number}")
            source = disk.get("source")
            if not source:
                made = {
                    "name": name,
                    "sizeGb": str(requested.get("diskSizeGb") or 10),
                    "type": f"{ROOT}/zones/{zone}/diskTypes/{_last(requested.get('diskType') or 'pd-balanced')}",
                    "labels": requested.get("labels") or {},
                    "users": [f"{ROOT}/zones/{zone}/instances/{body['name']}"],
                    "zone": f"{ROOT}/zones/{zone}",
                    "status": "READY",
                }
                source = self._put(f"zones/{zone}", "disks", made)["selfLink"]
            size = str(requested.get("diskSizeGb") or 10)
            flags = {"boot": number == 0, "autoDelete": bool(disk.get("autoDelete")), "mode": "READ_WRITE"}
            attached.append({"source": source, "deviceName": name, "index": number, "diskSizeGb": size, **flags})
        return attached

    def _delete(self, scope: str, collection: str, name: str) -> Json:
        thing, now = self._get(scope, collection, name), datetime.now(UTC)
        if collection == "networks":
            users = [one for one in self._all_of("subnetworks") if _last(one["network"]) == name]
            users += [one for one in self._all_of("firewalls") if _last(one["network"]) == name]
            machines = [i for i in self._instances() if _last(i["networkInterfaces"][0]["network"]) == name]
            if machines or any(not thing.get("autoCreateSubnetworks") or "allowed" in one for one in users):
                raise _in_use(f"{scope}/networks/{name}")
            for one in users:
                self.resources.pop((f"regions/{_last(one['region'])}", "subnetworks", one["name"]), None)
        if collection == "subnetworks" and any(
            _last(i["networkInterfaces"][0]["subnetwork"]) == name and _region(i) == _last(scope)
            for i in self._instances()
        ):
            raise _in_use(f"{scope}/subnetworks/{name}")
        if collection == "disks" and thing.get("users"):
            raise _in_use(f"{scope}/disks/{name}")
        if collection == "instances":
            zone, run = _last(scope), _run_of(thing)
            self._allowed("delete", zone, run)
            if self.faults.met(Kind.ENDS_FAIL, f"gcp/{zone.rpartition('-')[0]}/{zone}", run=run):
                return self._operation(scope, "delete", thing, INTERNAL_ERROR)
            self._remove(thing, now)
        else:
            del self.resources[scope, collection, name]
        return self._operation(scope, "delete", thing, at=now)

    def _remove(self, instance: Json, at: datetime) -> None:
        zone = _last(instance["zone"])
        self.ended_ms.setdefault(instance["id"], _ms(at))
        del self.resources[f"zones/{zone}", "instances", instance["name"]]
        self.preempted.pop(instance["id"], None)
        self.ended.append({**instance, "status": "DELETED"})
        self.ended_at[instance["id"]] = time.monotonic()
        for disk in instance["disks"]:
            if disk["autoDelete"]:
                self.resources.pop((f"zones/{zone}", "disks", _last(disk["source"])), None)
            elif (f"zones/{zone}", "disks", _last(disk["source"])) in self.resources:
                self.resources[f"zones/{zone}", "disks", _last(disk["source"])]["users"] = []

    def _change(self, scope: str, collection: str, thing: Json, verb: str, body: Json) -> Json:
        now = datetime.now(UTC)
        match collection, verb:
            case _, "setLabels":
                thing["labels"] = body.get("labels") or {}
            case "instances", "setTags":
                thing["tags"] = {"fingerprint": "aA==", **body}
            case "instances", "setMetadata":
                thing["metadata"] = {"fingerprint": "aA==", **body}
            case "instances", "setScheduling":
                thing["scheduling"] |= body
            case "instances", "stop":
                self._stop(thing, now)
            case "instances", "start":
                thing["status"], thing["lastStartTimestamp"] = "RUNNING", _text(now)
            case "disks", "resize":
                thing["sizeGb"] = body["sizeGb"]
            case "instances", "simulateMaintenanceEvent":
                self._simulate_maintenance(_last(scope), thing)
            case _:
                raise _unknown("POST", f"{scope}/{collection}/{verb}")
        return self._operation(scope, verb, thing, at=now)

    def _simulate_maintenance(self, zone: str, thing: Json) -> None:
        """Preempt a Spot VM. Any other VM migrates, and goes on."""
        where, run = f"gcp/{zone.rpartition('-')[0]}/{zone}", _run_of(thing)
        self._allowed("simulateMaintenanceEvent", zone, run)
        if thing["scheduling"]["provisioningModel"] != "SPOT" or self.faults.met(Kind.UNFULFILLED, where, run=run):
            return
        is_announced = self.faults.met(Kind.UNANNOUNCED, where, run=run) is None
        self.reclaim(thing["id"], self.notice_s if is_announced else 0.0, notice=is_announced)

    # --- operations

    def _operation(
        self,
        scope: str,
        kind: str,
        target: Json,
        error: Json | None = None,
        user: str = CLIENT_EMAIL,
        at: datetime | None = None,
    ) -> Json:
        now = _text(at or datetime.now(UTC))
        done: Json = {
            "name": f"operation-{self._number()}",
            "operationType": kind,
            "status": "DONE",
            "progress": 100,
            "insertTime": now,
            "startTime": now,
            "endTime": now,
            "targetLink": target["selfLink"],
            "targetId": target.get("id", "0"),
            "user": user,
        }
        where, _, name = scope.partition("/")
        if name:
            done[where.removesuffix("s")] = f"{ROOT}/{scope}"
        if error:
            done |= {"error": {"errors": [error]}, "_error": True}
            done |= {"httpErrorStatusCode": 503, "httpErrorMessage": "SERVICE UNAVAILABLE"}
        done = self._put(scope, "operations", done)
        running = {key: value for key, value in done.items() if key not in ("error", "endTime", "_error")}
        return {**running, "status": "RUNNING", "progress": 0}

    def _operations(self, scope: str, name: str, query: Mapping[str, str]) -> Json:
        if name:
            return _public(self._get(scope, "operations", name))
        return {"items": [_public(one) for one in _filtered(self._all(scope, "operations"), query)]}

    # --- resources

    def _put(self, scope: str, collection: str, thing: Json) -> Json:
        link = f"{ROOT}/{scope}/{collection}/{thing['name']}"
        made = {"id": self._number(), "creationTimestamp": _now(), **thing, "selfLink": link}
        self.resources[scope, collection, thing["name"]] = made
        return made

    def _subnetwork(self, region: str, name: str, network: str, range_: str, body: Json | None = None) -> Json:
        links = {"network": f"{ROOT}/global/networks/{network}", "region": f"{ROOT}/regions/{region}"}
        made = {**(body or {}), "name": name, "ipCidrRange": range_, **links}
        return self._put(f"regions/{region}", "subnetworks", made)

    def _firewall(self, body: Json) -> Json:
        network = _last(body.get("network") or "default")
        self._get("global", "networks", network)
        defaults = {"direction": "INGRESS", "priority": 1000, "disabled": False}
        return self._put("global", "firewalls", {**defaults, **body, "network": f"{ROOT}/global/networks/{network}"})

    def _get(self, scope: str, collection: str, name: str) -> Json:
        if (scope, collection, name) not in self.resources:
            raise _missing(f"{scope}/{collection}/{name}")
        return self.resources[scope, collection, name]

    def _all(self, scope: str, collection: str) -> list[Json]:
        return [thing for (where, kind, _), thing in self.resources.items() if (where, kind) == (scope, collection)]

    def _all_of(self, collection: str) -> list[Json]:
        return [thing for (_, kind, _), thing in self.resources.items() if kind == collection]

    def _instances(self) -> list[Json]:
        return self._all_of("instances")

    def _number(self) -> str:
        self.counter += 1
        return str(self.counter)

    # --- Resource Manager and IAM

    def _manager(self, method: str, path: str, body: Json) -> Json:
        found = re.fullmatch(r"/v[13]/projects(?:/([^/:]+))?(?::(\w+))?", path)
        if found is None:
            raise _unknown(method, path)
        project = {"projectId": PROJECT, "projectNumber": "1", "name": PROJECT, "lifecycleState": "ACTIVE"}
        match found[2]:
            case "testIamPermissions":
                requested = body.get("permissions", [])
                return {"permissions": [one for one in requested if not self.faults.met(Kind.DENIED, "gcp", code=one)]}
            case "getIamPolicy":
                return self.policy
            case "setIamPolicy":
                self.policy = body["policy"]
                return self.policy
            case _:
                if not found[1]:
                    return {"projects": [project]}
                if found[1] != PROJECT:
                    raise Refused(403, "forbidden", "The caller does not have permission")
                return project

    def _iam(self, method: str, path: str, body: Json) -> Json:
        if found := re.fullmatch(r"/v1/projects/[^/]+/serviceAccounts(?:/([^/:]+))?(?::(\w+))?", path):
            email, verb = found[1], found[2]
            if email is None:
                if method == "GET":
                    return {"accounts": list(self.accounts.values())}
                return self._add_account(body["accountId"], body.get("serviceAccount") or {})
            if email not in self.accounts:
                raise _missing(f"serviceAccounts/{email}")
            if verb == "testIamPermissions":
                return {"permissions": body.get("permissions", [])}
            if verb == "getIamPolicy":
                return self.account_policies.get(email, {"version": 1, "bindings": []})
            if verb == "setIamPolicy":
                self.account_policies[email] = body["policy"]
                return body["policy"]
            return self.accounts.pop(email) and {} if method == "DELETE" else self.accounts[email]
        if found := re.fullmatch(r"/v1/(?:projects/[^/]+/)?roles(?:/([^/:]+))?(?::(\w+))?", path):
            name = found[1]
            if name is None and method == "POST":
                name = body["roleId"]
                role = {**(body.get("role") or {}), "name": f"projects/{PROJECT}/roles/{name}"}
                if self.roles.get(name, {}).get("deleted"):
                    raise Refused(400, "failedPrecondition", f"You can't create a role with role_id ({name}) where ...")
                if name in self.roles:
                    raise Refused(409, "alreadyExists", f"A role named {name} already exists.")
                self.roles[name] = role
                return role
            if name is None:
                return {"roles": list(self.roles.values())}
            if not path.startswith("/v1/projects/"):
                return {"name": f"roles/{name}", "includedPermissions": []}
            if name not in self.roles:
                raise _missing(f"roles/{name}")
            if method == "DELETE" or found[2] == "undelete":
                self.roles[name]["deleted"] = method == "DELETE"  # its name stays taken, and it can be restored
            if method == "PATCH":
                self.roles[name] |= body
            return self.roles[name]
        raise _unknown(method, path)

    def _add_account(self, account: str, account_fields: Json) -> Json:
        email = f"{account}@{PROJECT}.iam.gserviceaccount.com"
        if email in self.accounts:
            raise Refused(409, "alreadyExists", f"Service account {account} already exists.")
        self.accounts[email] = {
            **account_fields,
            "name": f"projects/{PROJECT}/serviceAccounts/{email}",
            "projectId": PROJECT,
            "email": email,
            "uniqueId": self._number(),
        }
        return self.accounts[email]

    # --- instances

    def machines(self) -> dict[str, HostSpec]:
        """Return the instances with a host: running or under notice."""
        with self.lock:
            return {
                i["id"]: self._spec(i)
                for i in self._instances()
                if (i["status"] == "RUNNING" or i["id"] in self.preempted) and self._boots(i)
            }

    def _boots(self, instance: Json) -> bool:
        if instance["id"] not in self.booting:
            place = f"gcp/{_region(instance)}/{_last(instance['zone'])}"
            self.booting[instance["id"]] = self.faults.met(Kind.NO_BOOT, place) is None
        return self.booting[instance["id"]]

    def reclaim(self, instance_id: str, seconds: float, notice: bool) -> None:
        """Preempt an instance: STOPPING and the notice now, and the end after this many seconds."""

        now = datetime.now(UTC)
        if notice:
            self._preempt(instance_id, now)
        later(seconds, lambda: self._take(instance_id, now + timedelta(seconds=seconds)))

    def _take(self, instance_id: str, at: datetime) -> None:
        """End a preempted instance. Its bill ends at the announced time, though a timer may be late."""
        with self.lock:
            self._preempt(instance_id, at)
            self._preempted(instance_id, at)

    def _preempt(self, instance_id: str, at: datetime) -> None:
        with self.lock:
            for instance in self._instances():
                if instance["id"] == instance_id and instance["status"] == "RUNNING":
                    instance["status"] = "STOPPING"
                    self.preempted[instance_id] = _text(at)
                    scope = f"zones/{_last(instance['zone'])}"
                    self._operation(scope, PREEMPTED, instance, user="system", at=at)
                    done = next(reversed(self._all(scope, "operations")))
                    done["statusMessage"] = "Instance was preempted."

    def _preempted(self, instance_id: str, at: datetime) -> None:
        for instance in self._instances():
            if instance["id"] == instance_id and instance_id in self.preempted:
                if instance["scheduling"].get("instanceTerminationAction") == "DELETE":
                    self._remove(instance, at)
                else:
                    del self.preempted[instance_id]
                    self._stop(instance, at)

    def _stop(self, instance: Json, at: datetime) -> None:
        self.ended_ms.setdefault(instance["id"], _ms(at))
        instance["status"], instance["lastStopTimestamp"] = "TERMINATED", _text(at)

    def powered_off(self, instance_id: str) -> None:
        with self.lock:
            for instance in self._instances():
                if instance["id"] == instance_id and instance["status"] == "RUNNING":
                    now, scope = datetime.now(UTC), f"zones/{_last(instance['zone'])}"
                    self._stop(instance, now)
                    self._operation(scope, "compute.instances.guestTerminate", instance, user="system", at=now)

    def _spec(self, instance: Json) -> HostSpec:
        interface = instance["networkInterfaces"][0]
        items = {one["key"]: one["value"] for one in instance["metadata"].get("items") or []}
        logins = [line.partition(":") for line in items.get("ssh-keys", "").splitlines() if ":" in line]
        return HostSpec(
            id=instance["id"],
            cloud="gcp",
            region=_region(instance),
            zone=_last(instance["zone"]),
            name=instance["name"],
            instance_type=_last(instance["machineType"]),
            market="spot" if instance["scheduling"]["provisioningModel"] == "SPOT" else "on_demand",
            labels=tuple(sorted((instance.get("labels") or {}).items())),
            network=f"gcp/{_last(interface['network'])}",
            private=interface["networkIP"],
            public=(interface.get("accessConfigs") or [{}])[0].get("natIP", ""),
            user=logins[0][0].strip() if logins else "gcpuser",
            keys=tuple(key.strip() for _, _, key in logins),
            rules=tuple(self._rules(instance)),
        )

    def _rules(self, instance: Json) -> Iterable[Allow]:
        network = instance["networkInterfaces"][0]["network"]
        rules = [r for r in self._all("global", "firewalls") if r["network"] == network and not r["disabled"]]
        for rule in sorted(rules, key=lambda rule: (rule["priority"], "allowed" in rule)):
            if rule["direction"] != "INGRESS" or not _targets(rule, instance):
                continue
            ranges = tuple(rule.get("sourceRanges") or ())
            members = tuple(
                one["networkInterfaces"][0]["networkIP"]
                for one in self._instances()
                if one["networkInterfaces"][0]["network"] == network and _is_source(rule, one)
            )
            if not ranges and not rule.get("sourceTags") and not rule.get("sourceServiceAccounts"):
                ranges = ("0.0.0.0/0",)
            for deny, entries in ((False, rule.get("allowed")), (True, rule.get("denied"))):
                for entry in entries or []:
                    for ports in entry.get("ports") or [None]:
                        low, _, high = (ports or "").partition("-")
                        span = (int(low), int(high or low)) if ports else None
                        protocol = entry["IPProtocol"]
                        yield Allow(protocol=protocol, ports=span, ranges=ranges, members=members, deny=deny)

    # --- metadata

    def paths(self, instance_id: str) -> Mapping[str, str]:
        with self.lock:
            instance = next((i for i in self._instances() if i["id"] == instance_id), None)
            if instance is None:
                return {}
            interface = instance["networkInterfaces"][0]
            items = {one["key"]: one["value"] for one in instance["metadata"].get("items") or []}
            values = {
                "project/project-id": PROJECT,
                "project/numeric-project-id": "1",
                "universe/universe-domain": "googleapis.com",
                "instance/id": instance["id"],
                "instance/name": instance["name"],
                "instance/hostname": f"{instance['name']}.c.{PROJECT}.internal",
                "instance/zone": f"projects/1/zones/{_last(instance['zone'])}",
                "instance/machine-type": f"projects/1/machineTypes/{_last(instance['machineType'])}",
                "instance/preempted": "TRUE" if instance_id in self.preempted else "FALSE",
                "instance/maintenance-event": "TERMINATE_ON_HOST_MAINTENANCE"
                if instance_id in self.preempted
                else "NONE",
                "instance/scheduling/preemptible": str(instance["scheduling"]["provisioningModel"] == "SPOT").upper(),
                "instance/network-interfaces/0/ip": interface["networkIP"],
                "instance/tags": json.dumps(instance["tags"].get("items") or []),
            }
            values |= {f"instance/attributes/{key}": value for key, value in items.items()}
            for account in instance.get("serviceAccounts") or []:
                scopes = "\n".join(account.get("scopes") or [])
                token = {
                    "access_token": f"{NODE_TOKEN}{account['email']}",
                    "expires_in": 3599,
                    "token_type": "Bearer",
                }
                for name in ("default", account["email"]):
                    base = f"instance/service-accounts/{name}"
                    values |= {
                        f"{base}/email": account["email"],
                        f"{base}/scopes": scopes,
                        f"{base}/aliases": "default",
                    }
                    values[f"{base}/token"] = json.dumps(token)
            return values

    # --- inventory

    def inventory(self) -> list[Json]:
        kinds = {
            "instances": "instance",
            "disks": "disk",
            "addresses": "address",
            "firewalls": "firewall",
            "networks": "network",
            "subnetworks": "subnetwork",
            "resourcePolicies": "policy",
        }
        with self.lock:
            things = [
                {"cloud": "gcp", "region": _last(scope), "kind": kinds[collection], "id": name}
                | {"labels": thing.get("labels") or {}, "state": thing.get("status", "")}
                for (scope, collection, name), thing in self.resources.items()
                if collection in kinds
            ]
            things += [
                {"cloud": "gcp", "region": "", "kind": "service_account", "id": email} for email in self.accounts
            ]
            kept = [name for name, role in self.roles.items() if not role.get("deleted")]
            things += [{"cloud": "gcp", "region": "", "kind": "role", "id": name} for name in kept]
            things += [
                {"cloud": "gcp", "region": "", "kind": "binding", "id": f"{binding['role']} {member}"}
                for binding in self.policy.get("bindings", [])
                for member in binding.get("members", [])
            ]
            return things

    def all_instances(self) -> list[Json]:
        with self.lock:
            return [
                {
                    "cloud": "gcp",
                    "id": i["id"],
                    "name": i["name"],
                    "region": _region(i),
                    "zone": _last(i["zone"]),
                    "state": i["status"].lower(),
                    "market": "spot" if i["scheduling"]["provisioningModel"] == "SPOT" else "on_demand",
                    "instance_type": _last(i["machineType"]),
                    "labels": i.get("labels") or {},
                    "reason": "preempted" if self._was_preempted(i) else "",
                    "launched_ms": _ms(i["lastStartTimestamp"]),
                    "ended_ms": self.ended_ms.get(i["id"]),
                    "private": i["networkInterfaces"][0]["networkIP"],
                    "public": (i["networkInterfaces"][0].get("accessConfigs") or [{}])[0].get("natIP", ""),
                }
                for i in [*self._instances(), *self.ended]
            ]

    def _was_preempted(self, instance: Json) -> bool:
        ended = self._all(f"zones/{_last(instance['zone'])}", "operations")
        return any((one["operationType"], one["targetId"]) == (PREEMPTED, instance["id"]) for one in ended)


# --- reading -----------------------------------------------------------------------------------------


def _grant_notice(scheduling: Json, is_known: bool) -> None:
    """Write the notice that was asked for as the API answers it, or refuse it."""
    notice = scheduling.get("preemptionNoticeDuration")
    if notice is None:
        return
    if not is_known:
        text = "Invalid JSON payload received. Unknown name \"preemptionNoticeDuration\" at 'resource.scheduling'"
        raise Refused(400, "badRequest", text)
    if scheduling.get("provisioningModel") != "SPOT":
        text = "Invalid value for field 'resource.scheduling.preemptionNoticeDuration': only for Spot VMs."
        raise Refused(400, "invalid", text)
    scheduling["preemptionNoticeDuration"] = {"seconds": str(int(notice["seconds"]))}


def is_users(token: str) -> bool:
    """Return whether a token is the user's, and not that of an instance's service account."""
    return not token.startswith(NODE_TOKEN)


def _missing(what: str) -> Refused:
    return Refused(404, "notFound", f"The resource 'projects/{PROJECT}/{what}' was not found")


def _in_use(what: str) -> Refused:
    text = f"The resource 'projects/{PROJECT}/{what}' is already being used by another resource"
    return Refused(400, "resourceInUseByAnotherResource", text)


def _unknown(method: str, path: str) -> Refused:
    return Refused(404, "notFound", f"the fake Google Cloud does not know {method} {path}")


def _last(link: str) -> str:
    return link.rstrip("/").rpartition("/")[2]


def _run_of(instance: Json) -> str:
    """Return the run of an instance by its label; "" without."""
    return str((instance.get("labels") or {}).get("spotrl-run", ""))


def _region(instance: Json) -> str:
    return _last(instance["zone"]).rpartition("-")[0]


def _now() -> str:
    return _text(datetime.now(UTC))


def _text(at: datetime) -> str:
    return at.isoformat(timespec="milliseconds")


def _ms(at: datetime | str) -> int:
    """Return UTC milliseconds of a time as `_text` writes it."""
    return round(datetime.fromisoformat(at if isinstance(at, str) else _text(at)).timestamp() * 1000)


def _public(thing: Json) -> Json:
    return {key: value for key, value in thing.items() if not key.startswith("_")}


def _metric(machine_type: str, accelerators: Sequence[Json] | None, market: str) -> tuple[str, int]:
    """Return the quota that an instance counts against, and its amount: GPUs, or else cores."""
    name = _last(machine_type)
    kinds = {_last(one["acceleratorType"]): int(one["acceleratorCount"]) for one in accelerators or []}
    known = KNOWN.get(name)
    if kinds:
        kind, count = next(iter(kinds.items()))
        metric = kind.replace("nvidia-tesla", "nvidia").replace("-", "_").upper().replace("_80GB", "") + "_GPUS"
    elif known and known.gpus:
        metric, count = f"NVIDIA_{known.accelerator.replace('-', '_')}_GPUS", known.gpus
    else:
        metric, count = "CPUS", known.vcpus if known else 2
    return (f"PREEMPTIBLE_{metric}" if market == "spot" else metric), count


def _targets(rule: Json, instance: Json) -> bool:
    tags, accounts = rule.get("targetTags"), rule.get("targetServiceAccounts")
    if tags:
        return bool({*tags} & {*(instance["tags"].get("items") or [])})
    if accounts:
        return bool({*accounts} & {one["email"] for one in instance.get("serviceAccounts") or []})
    return True


def _is_source(rule: Json, instance: Json) -> bool:
    tags, accounts = {*(rule.get("sourceTags") or [])}, {*(rule.get("sourceServiceAccounts") or [])}
    has = {*(instance["tags"].get("items") or [])}
    runs_as = {one["email"] for one in instance.get("serviceAccounts") or []}
    return bool(tags & has or accounts & runs_as)


def _filtered(things: Iterable[Json], query: Mapping[str, str]) -> list[Json]:
    text = query.get("filter", "")
    return [_public(thing) for thing in things if not text or _Filter(text).holds(thing)]


class _Filter:
    """A filter like `(labels.a = b) AND (status = X OR name:y*)`: only the syntax that clients use."""

    TOKEN = re.compile(r"""\s*(\(|\)|!=|>=|<=|[=:<>]|"[^"]*"|'[^']*'|[^\s()=:!<>"']+)""")

    def __init__(self, text: str) -> None:
        self.tokens = self.TOKEN.findall(text)
        self.at = 0

    def holds(self, thing: Json) -> bool:
        self.at = 0
        return self._any(thing)

    def _peek(self) -> str:
        return self.tokens[self.at] if self.at < len(self.tokens) else ""

    def _any(self, thing: Json) -> bool:
        value = self._every(thing)
        while self._peek().upper() == "OR":
            self.at += 1
            value = self._every(thing) or value
        return value

    def _every(self, thing: Json) -> bool:
        value = self._one(thing)
        while self._peek() and self._peek() != ")" and self._peek().upper() != "OR":
            if self._peek().upper() == "AND":
                self.at += 1
            value = self._one(thing) and value
        return value

    def _one(self, thing: Json) -> bool:
        if self._peek().upper() in ("NOT", "-"):
            self.at += 1
            return not self._one(thing)
        if self._peek() == "(":
            self.at += 1
            value = self._any(thing)
            self.at += 1
            return value
        key, how, wanted = (part.strip("\"'") for part in self.tokens[self.at : self.at + 3])
        self.at += 3
        found: Any = thing
        for part in key.split(".", 1) if key.startswith("labels.") else key.split("."):
            found = found.get(part) if isinstance(found, dict) else None
        text = "" if found is None else str(found)
        if how in ("!=", "ne"):
            return text != wanted
        if how == "eq":
            return re.fullmatch(wanted, text) is not None
        if how in (">", ">=", "<", "<="):
            return {">": text > wanted, ">=": text >= wanted, "<": text < wanted, "<=": text <= wanted}[how]
        if wanted == "*":
            return found is not None
        pattern = re.escape(wanted).replace(r"\*", ".*")
        links = text.startswith("https://") and _last(text) == _last(wanted)
        return links or re.fullmatch(pattern, text) is not None
