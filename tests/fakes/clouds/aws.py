"""AWS: moto's server with the parts of EC2 that moto lacks, behind a server for faults.

moto keeps the state and speaks the protocol; its code is unchanged. `Aws` replaces a few methods of its backends (once,
in the world's own process): spot instances report their market and the reason of their end, a client token creates one
instance, addresses come from the world's ranges, capacity can be unavailable. A small WSGI application before moto's
answers prices, quotas and every requested fault.

Signatures are not checked: any key is accepted, also that of an instance profile. Only the region of S3 requests is
checked: S3 refuses a region other than the bucket's.
"""

import io
import json
import os
import re
import secrets
import socket
import threading
import time
from base64 import b64decode
from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime, timedelta
from ipaddress import IPv4Network
from math import inf
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs
from urllib.request import Request, urlopen
from xml.sax.saxutils import escape

from tests.fakes.clouds import addresses, fis
from tests.fakes.clouds.faults import Faults, Kind, later
from tests.fakes.clouds.hosts import HostSpec
from tests.fakes.clouds.metadata import ROLE_KEY, ec2_time, role_credentials
from tests.fakes.clouds.network import Allow
from tests.fakes.clouds.prices import INSTANCE_TYPES

AMI = "ami-0fakeclouds000001"
RUN_LABEL = "spotrl-run"
STALL_S = 0.2
"""Seconds between two checks whether a stalled call may continue."""
RECLAIMED = "Server.SpotInstanceTermination"
REFUSALS = {
    "InsufficientInstanceCapacity": "We currently do not have sufficient {type} capacity in the Availability Zone you "
    "requested ({zone}). Our system will be working on provisioning additional capacity.",
    "SpotMaxPriceTooLow": "Your Spot request price of 0.01 is lower than the minimum required Spot request fulfillment "
    "price of 0.42.",
    "MaxSpotInstanceCountExceeded": "Max spot instance count exceeded",
    "VcpuLimitExceeded": "You have requested more vCPU capacity than your current vCPU limit of {limit} allows for the "
    "instance bucket that the specified instance type belongs to. Please visit "
    "http://aws.amazon.com/contact-us/ec2-request to request an adjustment to this limit.",
    "UnauthorizedOperation": "You are not authorized to perform this operation.",
}
FORBIDDEN = (
    f"You are not authorized to perform this operation. User: arn:aws:iam::{addresses.ACCOUNT}:user/tester is not "
    "authorized to perform: ec2:{action} with an explicit deny in a service control policy"
)
EXEMPT = ("DescribeRegions",)
"""Calls to EC2 that AWS's own example of a policy on regions lets through. SkyPilot makes it in us-east-1."""
QUOTAS = {
    "L-1216C47A": ("Running On-Demand Standard (A, C, D, H, I, M, R, T, Z) instances", 256.0),
    "L-34B43A08": ("All Standard (A, C, D, H, I, M, R, T, Z) Spot Instance Requests", 256.0),
    "L-DB2E81BA": ("Running On-Demand G and VT instances", 256.0),
    "L-3819A6DF": ("All G and VT Spot Instance Requests", 256.0),
    "L-417A185B": ("Running On-Demand P instances", 384.0),
    "L-7212CCBC": ("All P4, P3 and P2 Spot Instance Requests", 384.0),
    "L-C4BD4855": ("All P5 Spot Instance Requests", 384.0),
}

VCPUS = {kind.instance_type: kind.vcpus for kind in INSTANCE_TYPES}

Wsgi = Callable[[dict[str, Any], Callable[..., Any]], Iterable[bytes]]


def settings(folder: Path) -> None:
    """Return the environment variables that moto reads at its import."""
    image = {
        "ami_id": AMI,
        "name": "fake-clouds",
        "description": "the hosts' baked image",
        "owner_id": addresses.ACCOUNT,
        "public": True,
        "virtualization_type": "hvm",
        "architecture": "x86_64",
        "state": "available",
        "platform": None,
        "image_type": "machine",
        "hypervisor": "xen",
        "root_device_name": "/dev/sda1",
        "root_device_type": "ebs",
        "sriov": "simple",
        "creation_date": "2026-11-01T00:00:00.000Z",
    }
    amis = folder / "amis.json"
    amis.write_text(json.dumps([image]))
    os.environ |= {
        "MOTO_AMIS_PATH": str(amis),
        # SkyPilot attaches managed policies to the role that it creates.
        "MOTO_IAM_LOAD_MANAGED_POLICIES": "true",
        "AWS_ACCESS_KEY_ID": "fake",
        "AWS_SECRET_ACCESS_KEY": "fake",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
    }


class Aws:
    cloud = "aws"

    def __init__(self, faults: Faults, pool: addresses.Pool, market_url: str, say: Callable[[str], None]) -> None:
        self.faults, self.pool, self.market_url, self.say = faults, pool, market_url, say
        self.notices: dict[str, tuple[datetime, datetime]] = {}
        """(time of the notice, announced time) by instance."""
        self.recommended: dict[str, datetime] = {}
        self.tokens: dict[tuple[str, str], Any] = {}
        self.booting: dict[str, bool] = {}
        self.quota_lag_s = 0.0
        self.notice_s = fis.NOTICE_S
        """Seconds between the notice of an interruption by FIS and the end; EC2 gives two minutes."""
        self.ended_ms: dict[str, int] = {}
        """End of the bill of each ended instance (UTC). EC2 names it in the reason of the end."""
        self.ran_at: dict[str, float] = {}
        """Monotonic seconds at which an instance was last seen running."""
        self.calls: dict[str, int] = {}
        self.quotas = {code: value for code, (_, value) in QUOTAS.items()}
        self.lock = threading.RLock()
        _adapt(self)

    # --- the server

    def serve(self) -> None:
        from moto.moto_server.werkzeug_app import DomainDispatcherApplication, MotoRequestHandler, create_backend_app
        from werkzeug.serving import make_server

        class Quiet(MotoRequestHandler):
            def log(self, *_: object) -> None:
                pass

        app = self._before(DomainDispatcherApplication(create_backend_app))
        server = make_server(addresses.API, 80, app, threaded=True, request_handler=Quiet)
        server.daemon_threads = True  # type: ignore[attr-defined]
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()

    def furnish(self, buckets: Iterable[str], far: Mapping[str, str]) -> None:
        """Create the default resources of an account (routes to the internet), and the buckets of the tests.

        `far`: buckets outside us-east-1, and the region of each.
        """
        import boto3

        for region in addresses.regions_of("aws"):
            ec2 = boto3.client("ec2", region_name=region.name, endpoint_url=addresses.AWS_URL)
            vpc = ec2.describe_vpcs(Filters=[{"Name": "is-default", "Values": ["true"]}])["Vpcs"][0]["VpcId"]
            gateway = ec2.create_internet_gateway()["InternetGateway"]["InternetGatewayId"]
            ec2.attach_internet_gateway(InternetGatewayId=gateway, VpcId=vpc)
            table = ec2.describe_route_tables(Filters=[{"Name": "vpc-id", "Values": [vpc]}])["RouteTables"][0]
            ec2.create_route(RouteTableId=table["RouteTableId"], DestinationCidrBlock="0.0.0.0/0", GatewayId=gateway)
        s3 = boto3.client("s3", endpoint_url=addresses.AWS_URL)
        for bucket in buckets:
            s3.create_bucket(Bucket=bucket)
        for bucket, region_name in far.items():
            s3 = boto3.client("s3", region_name=region_name, endpoint_url=addresses.AWS_URL)
            s3.create_bucket(Bucket=bucket, CreateBucketConfiguration={"LocationConstraint": region_name})

    def _before(self, moto: Wsgi) -> Wsgi:
        def application(environ: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
            region, service = _scope(environ.get("HTTP_AUTHORIZATION", ""))
            is_expired = _is_users(environ) and self.faults.met(Kind.EXPIRED, f"aws/{region}" if region else "aws")
            if service == "s3":
                if is_expired:
                    return _xml_error(start, "ExpiredToken", "The provided token has expired.", "Error", 400)
                if self.faults.met(Kind.STORE_DOWN, f"aws/{region}"):
                    return _xml_error(start, "SlowDown", "Please reduce your request rate.", root="Error")
                if (home := _home_of_other_bucket(environ, region)) is not None:
                    return _wrong_region(environ, start, region, home)
                return moto(environ, start)
            target = environ.get("HTTP_X_AMZ_TARGET", "")
            form = _form(environ)
            action = form.get("Action", target.rpartition(".")[2])
            if service == "fis":
                action = fis.action_of(environ["REQUEST_METHOD"], environ["PATH_INFO"])
            with self.lock:
                self.calls[action] = self.calls.get(action, 0) + 1
            where = f"aws/{region}" if region else "aws"
            if self.faults.met(Kind.UNREACHABLE, where):
                return _hang_up(environ)
            if self.faults.met(Kind.DOWN, where):
                return _xml_error(start, "Unavailable", "The service is unavailable. Please try again shortly.")
            if self.faults.met(Kind.THROTTLED, where):
                return _xml_error(start, "RequestLimitExceeded", "Request limit exceeded.")
            if is_expired:
                return _expired(start, service)
            is_regional = service == "ec2" and action not in EXEMPT
            if is_regional and self.faults.met(Kind.FORBIDDEN, where):
                return _xml_error(start, "UnauthorizedOperation", FORBIDDEN.format(action=action), status=403)
            if action == "TerminateInstances" and self.faults.met(Kind.ENDS_FAIL, where, run=self._run_of(form)):
                return _xml_error(start, "InternalError", "An internal error has occurred", status=500)
            if self.faults.met(Kind.DENIED, where, code=f"{service}:{action}", run=self._run_of(form)):
                return _xml_error(start, "UnauthorizedOperation", REFUSALS["UnauthorizedOperation"], status=403)
            if action == "SimulatePrincipalPolicy":
                return self._simulated(form, start)
            if action == "DescribeSpotInstanceRequests":
                return self._spot_requests(region, start)
            if action == "DescribeSpotPriceHistory" or service == "pricing":
                return self._market(environ, start)
            if service == "fis":
                return self._fault_injection(environ, start, region, action, moto)
            if service == "servicequotas":
                return self._quota(environ, start, action)
            while action == "RunInstances" and self.faults.met(Kind.STALLED, where):
                time.sleep(STALL_S)
            answer = moto(environ, start)
            if action == "RunInstances" and self.faults.met(Kind.LOST_REPLY, where):
                b"".join(answer)
                self.say("aws: the reply to RunInstances is lost")
                return _hang_up(environ)
            return answer

        return application

    def _market(self, environ: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
        """Answer price queries from the fake market."""
        body = environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
        kept = {"HTTP_AUTHORIZATION": "Authorization", "HTTP_X_AMZ_TARGET": "X-Amz-Target"}
        headers = {name: environ[key] for key, name in kept.items() if key in environ}
        with urlopen(Request(self.market_url, data=body, headers=headers, method="POST"), timeout=30) as answer:
            data = answer.read()
            start("200 OK", [("Content-Type", answer.headers["Content-Type"]), ("Content-Length", str(len(data)))])
            return [data]

    def _simulated(self, form: Mapping[str, str], start: Callable[..., Any]) -> Iterable[bytes]:
        """Allow every simulated permission unless a fault denies it."""
        actions = [value for key, value in form.items() if key.startswith("ActionNames.")]
        resource = next((value for key, value in form.items() if key.startswith("ResourceArns.")), "*")
        members = ""
        for action in actions:
            decision = "implicitDeny" if self.faults.met(Kind.DENIED, "aws", code=action) else "allowed"
            members += f"<member><EvalActionName>{action}</EvalActionName><EvalResourceName>{escape(resource)}"
            members += f"</EvalResourceName><EvalDecision>{decision}</EvalDecision></member>"
        results = f"<EvaluationResults>{members}</EvaluationResults><IsTruncated>false</IsTruncated>"
        inner = f"<SimulatePrincipalPolicyResult>{results}</SimulatePrincipalPolicyResult>"
        space = "https://iam.amazonaws.com/doc/2010-05-08/"
        return _xml(
            start, f'<SimulatePrincipalPolicyResponse xmlns="{space}">{inner}</SimulatePrincipalPolicyResponse>'
        )

    def _fault_injection(
        self, environ: dict[str, Any], start: Callable[..., Any], region: str, action: str, moto: Wsgi
    ) -> Iterable[bytes]:
        """Answer a call to the Fault Injection Service, and carry out a started experiment."""
        body = environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
        environ["wsgi.input"] = io.BytesIO(body)
        try:
            if action == "CreateExperimentTemplate":
                fis.check_template(body)
        except fis.Refused as refused:
            # The client reads the kind of an error from this header or from the body.
            return _json(start, "400 Bad Request", {"__type": "ValidationException", "message": str(refused)})
        run = json.loads(body).get("tags", {}).get(RUN_LABEL, "") if action == "StartExperiment" else ""
        if action == "StartExperiment" and self.faults.met(Kind.DENIED, f"aws/{region}", code=f"fis:{action}", run=run):
            return _json(start, "403 Forbidden", {"__type": "AccessDeniedException", "message": f"no fis:{action}"})
        answer = b"".join(moto(environ, start))
        if action == "StartExperiment" and b'"experiment"' in answer:
            spot = {
                f"arn:aws:ec2:{region}:{addresses.ACCOUNT}:instance/{one.id}": one.state
                for _, one in _instances()
                if one.region_name == region and one.lifecycle == "spot"
            }
            experiment = json.loads(answer)["experiment"]["id"]
            fis.carry_out(region, experiment, spot, lambda one: self.interrupt(region, one, run))
        return [answer]

    def _spot_requests(self, region: str, start: Callable[..., Any]) -> Iterable[bytes]:
        """Return one spot request per spot instance without filters; its status code shows the outcome."""
        items = ""
        for _, instance in _instances():
            if instance.region_name == region and instance.lifecycle == "spot":
                preempted = instance.state_reason.code == RECLAIMED
                running = instance.state == "running"
                state = "active" if running else "closed"
                code = "fulfilled" if running else "instance-terminated-by-user"
                if preempted:
                    code = "instance-terminated-no-capacity"
                elif running and instance.id in self.notices:
                    code = "marked-for-termination"
                items += (
                    f"<item><spotInstanceRequestId>{instance.spot_instance_request_id}</spotInstanceRequestId>"
                    f"<instanceId>{instance.id}</instanceId><type>one-time</type><state>{state}</state>"
                    f"<status><code>{code}</code><message>{code}</message></status></item>"
                )
        space = "http://ec2.amazonaws.com/doc/2016-11-15/"
        inner = f"<requestId>fake</requestId><spotInstanceRequestSet>{items}</spotInstanceRequestSet>"
        return _xml(
            start,
            f'<DescribeSpotInstanceRequestsResponse xmlns="{space}">{inner}</DescribeSpotInstanceRequestsResponse>',
        )

    def _quota(self, environ: dict[str, Any], start: Callable[..., Any], action: str) -> Iterable[bytes]:
        query = json.loads(environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0)) or b"{}")

        def quota(code: str) -> dict[str, Any]:
            return {
                "ServiceCode": "ec2",
                "QuotaCode": code,
                "QuotaName": QUOTAS[code][0],
                "Value": self.quotas[code],
                "Unit": "None",
                "Adjustable": True,
                "GlobalQuota": False,
            }

        code = query.get("QuotaCode", "")
        if action in ("GetServiceQuota", "GetAWSDefaultServiceQuota") and code in QUOTAS:
            return _json(start, "200 OK", {"Quota": quota(code)})
        if action in ("ListServiceQuotas", "ListAWSDefaultServiceQuotas"):
            return _json(start, "200 OK", {"Quotas": [quota(code) for code in QUOTAS]})
        return _json(start, "400 Bad Request", {"__type": "NoSuchResourceException", "Message": f"no quota {code}"})

    def over_quota(self, region: str, wanted: str, market: str, count: int) -> bool:
        """Return whether this many more instances would exceed the vCPU quota of the family."""
        code = _quota_code(wanted, market)
        since = time.monotonic() - self.quota_lag_s
        used = sum(
            VCPUS.get(instance.instance_type, 2)
            for _, instance in _instances()
            if instance.region_name == region
            and (instance.state == "running" or self.ran_at.get(instance.id, -inf) > since)
            and _quota_code(instance.instance_type, instance.lifecycle or "on_demand") == code
        )
        return used + count * VCPUS.get(wanted, 2) > self.quotas[code]

    def refusal(self, code: str, wanted: str, market: str, zone: str) -> str:
        """Return EC2's error message with the current quota."""
        limit = round(self.quotas[_quota_code(wanted, market)])
        return REFUSALS.get(code, code).format(type=wanted, zone=zone, limit=limit)

    # --- instances

    def machines(self) -> dict[str, HostSpec]:
        """Return the instances with a host, by instance id."""
        with self.lock:
            running = [(backend, one) for backend, one in _instances() if one.state == "running"]
            self.ran_at |= {one.id: time.monotonic() for _, one in running}
            return {one.id: _spec(backend, one) for backend, one in running if self._boots(one)}

    def _boots(self, instance: Any) -> bool:
        """Return whether an instance boots; decided once, when it is first seen."""
        if instance.id not in self.booting:
            zone = instance.placement.zone
            fault = self.faults.met(Kind.NO_BOOT, f"aws/{instance.region_name}/{zone}")
            self.booting[instance.id] = fault is None
        return self.booting[instance.id]

    def reclaim(self, instance_id: str, seconds: float, notice: bool) -> None:
        """Preempt a spot instance: with notice now, and the end after this many seconds."""
        if notice:
            now = datetime.now(UTC)
            self.notices[instance_id] = (now, now + timedelta(seconds=seconds))
        later(seconds, lambda: self._preempted(instance_id))

    def interrupt(self, region: str, instance_id: str, run: str) -> None:
        """Carry out an ordered preemption."""
        if self.faults.met(Kind.UNFULFILLED, f"aws/{region}", run=run):
            return
        is_announced = self.faults.met(Kind.UNANNOUNCED, f"aws/{region}", run=run) is None
        self.reclaim(instance_id, self.notice_s if is_announced else 0.0, notice=is_announced)

    def _run_of(self, form: Mapping[str, str]) -> str:
        """Return the run of the instances that a call to EC2 creates or names; "" without."""
        for key, value in form.items():
            if value == RUN_LABEL and key.startswith("TagSpecification.") and key.endswith(".Key"):
                return form.get(f"{key.removesuffix('Key')}Value", "")
        named = {value for key, value in form.items() if key.startswith("InstanceId.")}
        return next((_tags(one).get(RUN_LABEL, "") for _, one in _instances() if one.id in named), "") if named else ""

    def rebalance(self, instance_id: str) -> None:
        """Send a rebalance recommendation."""
        self.recommended[instance_id] = datetime.now(UTC)

    def _preempted(self, instance_id: str) -> None:
        with self.lock:
            for backend, instance in _instances():
                if instance.id == instance_id and instance.state not in ("terminated", "shutting-down"):
                    backend.terminate_instances([instance_id])
                    instance._reason = RECLAIMED
                    instance.state_reason.code = RECLAIMED
                    instance.state_reason.message = f"{RECLAIMED}: Spot instance termination"
        self.notices.pop(instance_id, None)

    def powered_off(self, instance_id: str) -> None:
        """Handle a guest that shut itself down."""
        with self.lock:
            for backend, instance in _instances():
                if instance.id == instance_id and instance.state == "running":
                    if instance.instance_initiated_shutdown_behavior == "terminate":
                        backend.terminate_instances([instance_id])
                    else:
                        backend.stop_instances([instance_id])
                    instance.state_reason.code = "Client.InstanceInitiatedShutdown"
                    instance.state_reason.message = "Client.InstanceInitiatedShutdown: Instance initiated shutdown"

    # --- metadata

    def paths(self, instance_id: str) -> Mapping[str, str]:
        found = next(((b, i) for b, i in _instances() if i.id == instance_id), None)
        if found is None:
            return {}
        backend, instance = found
        zone = instance.placement.zone
        identity = {
            "accountId": addresses.ACCOUNT,
            "architecture": "x86_64",
            "availabilityZone": zone,
            "imageId": instance.image_id,
            "instanceId": instance.id,
            "instanceType": instance.instance_type,
            "pendingTime": ec2_time(instance.launch_time.replace(tzinfo=UTC)),
            "privateIp": instance.private_ip,
            "region": instance.region_name,
            "version": "2017-09-30",
        }
        values = {
            "meta-data/ami-id": instance.image_id,
            "meta-data/hostname": instance.private_dns_name,
            "meta-data/instance-id": instance.id,
            "meta-data/instance-life-cycle": "spot" if instance.lifecycle == "spot" else "on-demand",
            "meta-data/instance-type": instance.instance_type,
            "meta-data/local-hostname": instance.private_dns_name,
            "meta-data/local-ipv4": instance.private_ip,
            "meta-data/placement/availability-zone": zone,
            "meta-data/placement/region": instance.region_name,
            "meta-data/public-ipv4": instance.public_ip or "",
            "dynamic/instance-identity/document": json.dumps(identity),
        }
        profile = _profile(backend, instance)
        if profile is not None:
            arn = {"Code": "Success", "InstanceProfileArn": profile.arn, "InstanceProfileId": profile.id}
            values["meta-data/iam/info"] = json.dumps(arn)
            for role in profile.roles:
                values[f"meta-data/iam/security-credentials/{role.name}"] = role_credentials(role.name)
        if notice := self.notices.get(instance_id):
            values["meta-data/spot/instance-action"] = json.dumps({"action": "terminate", "time": ec2_time(notice[1])})
            values["meta-data/spot/termination-time"] = ec2_time(notice[1])
        if recommended := self.recommended.get(instance_id) or (notice and notice[0]):
            values["meta-data/events/recommendations/rebalance"] = json.dumps({"noticeTime": ec2_time(recommended)})
        return values

    # --- inventory

    def inventory(self) -> list[dict[str, Any]]:
        from moto.iam.models import iam_backends

        things: list[dict[str, Any]] = []

        def add(region: str, kind: str, thing_id: str, **more: Any) -> None:
            things.append({"cloud": "aws", "region": region, "kind": kind, "id": thing_id, **more})

        for region, backend in _backends():
            for instance in _of(backend):
                if instance.state != "terminated":
                    add(region, "instance", instance.id, state=instance.state, labels=_tags(instance))
            for volume in list(backend.volumes.values()):
                add(region, "disk", volume.id, state=volume.status, labels=_tags(volume))
            for group in [one for groups in list(backend.groups.values()) for one in groups.values()]:
                add(region, "group", group.id, name=group.name, labels=_tags(group))
            for name in list(backend.key_pairs):
                add(region, "key", name)
            for allocation in list(backend.addresses):
                add(region, "address", allocation.allocation_id)
            for vpc in list(backend.vpcs.values()):
                add(region, "network", vpc.id)
        for partitions in list(iam_backends.values()):
            for iam in list(partitions.values()):
                for role in list(iam.roles.values()):
                    add("", "role", role.name)
                for profile in list(iam.instance_profiles.values()):
                    add("", "instance_profile", profile.name)
                for policy in list(iam.managed_policies.values()):
                    if ":aws:policy/" not in policy.arn:
                        add("", "policy", policy.name)
        return things

    def names(self, instance_id: str) -> list[str]:
        """Return the names by which a test can refer to an instance."""
        return next(([i.id, *_tags(i).values()] for _, i in _instances() if i.id == instance_id), [])

    def all_instances(self) -> list[dict[str, Any]]:
        """Return all instances since the start."""
        return [
            {
                "cloud": "aws",
                "id": i.id,
                "region": i.region_name,
                "zone": i.placement.zone,
                "state": i.state,
                "market": "spot" if i.lifecycle == "spot" else "on_demand",
                "instance_type": i.instance_type,
                "labels": _tags(i),
                "reason": i.state_reason.code,
                "launched_ms": _utc_ms(i.launch_time),
                "ended_ms": self.ended_ms.get(i.id),
                "private": i.private_ip,
                "public": i.public_ip,
            }
            for _, i in _instances()
        ]


def _adapt(aws: Aws) -> None:
    """Replace moto's methods with ours; see the module docstring."""
    from moto.ec2.exceptions import EC2ClientError
    from moto.ec2.models import EC2Backend
    from moto.ec2.models.availability_zones_and_regions import RegionsAndZonesBackend
    from moto.ec2.models.elastic_network_interfaces import NetworkInterface
    from moto.ec2.models.instances import Instance
    from moto.ec2.models.subnets import Subnet
    from moto.iam import policy_validation

    # moto would search other regions than ours one by one for terminated instances.
    known = {region.name: region for region in addresses.regions_of("aws")}
    RegionsAndZonesBackend.regions = [r for r in RegionsAndZonesBackend.regions if r.name in known]
    RegionsAndZonesBackend.zones = {
        name: [zone for zone in RegionsAndZonesBackend.zones[name] if zone.name in region.zones]
        for name, region in known.items()
    }

    # SkyPilot's own inline policy has no Version; IAM accepts that, moto does not.
    for validator in ("BaseIAMPolicyValidator", "IAMPolicyDocumentValidator"):
        getattr(policy_validation, validator).validate = lambda _: None

    def default_vpc(self: Any) -> Any:
        made = self.create_vpc(cidr_block=str(known[self.region_name].private), is_default=True)
        for zone in self.describe_availability_zones():
            self.create_default_subnet(zone.name)
        return made

    EC2Backend.create_default_vpc = default_vpc  # type: ignore[method-assign]

    def subnet_address(self: Any, instance: Any) -> str:
        taken = aws.pool.take(IPv4Network(str(self.cidr_block)))
        self._subnet_ips[taken] = instance
        return taken

    Subnet.get_available_subnet_ip = subnet_address  # type: ignore[method-assign]

    def public_address(self: Any) -> None:
        if str(self.public_ip_auto_assign).lower() == "true":
            self.public_ip = aws.pool.take(addresses.region("aws", self.ec2_backend.region_name).public)

    NetworkInterface.check_auto_public_ip = public_address  # type: ignore[method-assign]

    def ends_once(first: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """Return the method with a record of the end. The first end of an instance keeps its time and reason."""

        def ended(self: Any) -> Any:
            before = self._reason, self.state_reason
            known = aws.ended_ms.setdefault(self.id, _utc_ms(datetime.now(UTC)))
            previous = first(self)
            seconds = datetime.fromtimestamp(known / 1000, UTC)
            self._reason = f"User initiated ({seconds:%Y-%m-%d %H:%M:%S} GMT)"
            if previous.name == "terminated":
                self._reason, self.state_reason = before
            return previous

        return ended

    Instance.terminate = ends_once(Instance.terminate)  # type: ignore[method-assign]
    Instance.stop = ends_once(Instance.stop)  # type: ignore[method-assign]

    run_first = EC2Backend.run_instances

    def run_instances(self: Any, image_id: str, count: int, *args: Any, **kwargs: Any) -> Any:
        region = self.region_name
        with aws.lock:
            token = kwargs.get("client_token")
            if token and token != "ABCDE" and (region, token) in aws.tokens:
                return aws.tokens[region, token]
            market = "spot" if kwargs.get("instance_market_options") else "on_demand"
            zone = _zone(self, kwargs)
            wanted = kwargs.get("instance_type", "")
            aws.say(f"aws: RunInstances {count} {wanted} {market} in {zone or region}")
            run = kwargs.get("tags", {}).get("instance", {}).get(RUN_LABEL, "")
            where = f"aws/{region}/{zone}" if zone else f"aws/{region}"
            fault = aws.faults.met(Kind.CAPACITY, where, market, run=run)
            if fault:
                code = fault.code or "InsufficientInstanceCapacity"
                raise EC2ClientError(code, aws.refusal(code, wanted, market, zone or region))
            if aws.over_quota(region, wanted, market, count):
                code = "MaxSpotInstanceCountExceeded" if market == "spot" else "VcpuLimitExceeded"
                raise EC2ClientError(code, aws.refusal(code, wanted, market, zone or region))
            if not kwargs.get("subnet_id") and not any(nic.get("SubnetId") for nic in kwargs.get("nics") or []):
                # Without a subnet EC2 takes the default one of the zone.
                default = self.get_default_subnets()
                subnet = default.get(zone) or default[min(default)]
                if kwargs.get("nics"):
                    kwargs["nics"][0]["SubnetId"] = subnet.id
                else:
                    kwargs["subnet_id"] = subnet.id
            for mapping in kwargs.get("block_device_mappings") or []:
                if (
                    mapping["DeviceName"] == "/dev/sda1"
                ):  # the image defines this for its root volume, but moto does not read it
                    mapping["Ebs"]["DeleteOnTermination"] = True
            reservation = run_first(self, image_id, count, *args, **kwargs)
            for instance in reservation.instances:
                if market == "spot":
                    # moto's answers contain every attribute of an instance.
                    vars(instance)["instance_lifecycle"] = "spot"
                    vars(instance)["spot_instance_request_id"] = f"sir-{secrets.token_hex(4)}"
            if token and token != "ABCDE":
                aws.tokens[region, token] = reservation
            return reservation

    EC2Backend.run_instances = run_instances  # type: ignore[method-assign]


def _quota_code(instance_type: str, market: str) -> str:
    """Return the quota that an instance type counts against."""
    codes = {"g": ("L-DB2E81BA", "L-3819A6DF"), "p": ("L-417A185B", "L-7212CCBC")}
    codes["p5"] = ("L-417A185B", "L-C4BD4855")
    family = instance_type.partition(".")[0]
    on_demand, spot = codes.get(family[:2]) or codes.get(family[:1]) or ("L-1216C47A", "L-34B43A08")
    return spot if market == "spot" else on_demand


def _zone(backend: Any, kwargs: Mapping[str, Any]) -> str:
    subnets = [nic.get("SubnetId") for nic in kwargs.get("nics") or []] + [kwargs.get("subnet_id")]
    for subnet in filter(None, subnets):
        return str(backend.get_subnet(subnet).availability_zone)
    return str(kwargs.get("placement") or "")


def _backends() -> list[tuple[str, Any]]:
    from moto.ec2.models import ec2_backends

    return [
        (name, backend)
        for account in list(ec2_backends.values())
        for name, backend in list(account.items())
        if name in {region.name for region in addresses.regions_of("aws")}
    ]


def _of(backend: Any) -> list[Any]:
    return [instance for reservation in list(backend.reservations.values()) for instance in list(reservation.instances)]


def _instances() -> list[tuple[Any, Any]]:
    return [(backend, instance) for _, backend in _backends() for instance in _of(backend)]


def _utc_ms(when: datetime) -> int:
    """Return a time as EC2 says and bills it, in whole seconds."""
    return int(when.replace(tzinfo=UTC).timestamp()) * 1000


def _tags(resource: Any) -> dict[str, str]:
    return {tag["key"]: tag["value"] for tag in resource.get_tags()}


def _profile(backend: Any, instance: Any) -> Any:
    associated = backend.iam_instance_profile_associations.get(instance.id)
    return associated.iam_instance_profile if associated else None


def _spec(backend: Any, instance: Any) -> HostSpec:
    user, keys = _login(instance.user_data)
    return HostSpec(
        id=instance.id,
        cloud="aws",
        region=instance.region_name,
        zone=instance.placement.zone,
        name=_tags(instance).get("Name", instance.id),
        instance_type=instance.instance_type,
        market="spot" if instance.lifecycle == "spot" else "on_demand",
        labels=tuple(sorted(_tags(instance).items())),
        network=f"aws/{instance.vpc_id}",
        private=instance.private_ip,
        public=instance.public_ip or "",
        user=user,
        keys=tuple(keys or _keypair(backend, instance.key_name)),
        rules=tuple(_rules(backend, instance)),
    )


def _keypair(backend: Any, name: str | None) -> list[str]:
    pair = backend.key_pairs.get(name) if name else None
    return [pair.material_public.decode().strip()] if pair is not None and pair.material_public else []


def _login(user_data: Any) -> tuple[str, list[str]]:
    """Return the login user and key, as cloud-init would read them."""
    text = user_data.decode() if isinstance(user_data, bytes) else str(user_data or "")
    for _ in range(2):
        if text and "ssh" not in text:
            try:
                text = b64decode(text).decode()
            except ValueError:
                break
    user = re.search(r"- name:\s*(\S+)", text)
    return (user[1] if user else "ubuntu"), re.findall(r"((?:ssh-\S+|ecdsa-\S+) [A-Za-z0-9+/=]+)", text)


def _rules(backend: Any, instance: Any) -> Iterable[Allow]:
    groups = {group.id: group for group in [*instance.security_groups, *instance.nics[0].group_set]}
    for group in groups.values():
        for rule in group.ingress_rules:
            ranges = (rule.ip_range["CidrIp"],) if rule.ip_range.get("CidrIp") else ()
            members = _members(backend, rule.source_group) if rule.source_group else ()
            protocol = {"-1": "all"}.get(str(rule.ip_protocol), str(rule.ip_protocol))
            ports = (rule.from_port, rule.to_port) if protocol in ("tcp", "udp") else None
            yield Allow(protocol=protocol, ports=ports, ranges=ranges, members=tuple(members))


def _members(backend: Any, source: Mapping[str, str]) -> list[str]:
    wanted = {source.get("GroupId"), source.get("GroupName")} - {None}
    return [
        instance.private_ip
        for instance in _of(backend)
        if instance.state == "running"
        and any({group.id, group.name} & wanted for group in [*instance.security_groups, *instance.nics[0].group_set])
    ]


# --- answers -----------------------------------------------------------------------------------------


def _scope(authorization: str) -> tuple[str, str]:
    """Return region and service from `Credential=KEY/20251121/us-east-1/ec2/aws4_request`."""
    found = re.search(r"Credential=[^/]+/\d+/([^/]*)/([^/]+)/", authorization)
    return (found[1], found[2]) if found else ("", "s3")


def _is_users(environ: Mapping[str, Any]) -> bool:
    """Return whether a call is signed with the user's key, and not with an instance's."""
    key = environ.get("HTTP_AUTHORIZATION", "").partition("Credential=")[2]
    return bool(key) and not key.startswith(ROLE_KEY)


def _expired(start: Callable[..., Any], service: str) -> Iterable[bytes]:
    """Return a service's answer to keys that have expired."""
    if service in ("servicequotas", "pricing", "fis"):
        text = {"__type": "ExpiredTokenException", "message": "The security token included in the request is expired"}
        return _json(start, "400 Bad Request", text)
    if service == "ec2":
        return _xml_error(start, "RequestExpired", "Request has expired.", status=400)
    return _xml_error(start, "ExpiredToken", "The security token included in the request is expired", status=403)


def _home_of_other_bucket(environ: Mapping[str, Any], signed_for: str) -> str | None:
    """Return the region of a request's bucket if the request is signed for another region.

    A request for a bucket's region may be signed for any region, or not at all.
    """
    from moto.s3.models import s3_backends

    if not signed_for or environ.get("QUERY_STRING", "") in ("location", "location="):
        return None
    name = environ["PATH_INFO"].strip("/").partition("/")[0]
    bucket = s3_backends[addresses.ACCOUNT]["aws"].buckets.get(name)
    return None if bucket is None or bucket.region_name == signed_for else str(bucket.region_name)


def _wrong_region(environ: Mapping[str, Any], start: Callable[..., Any], signed_for: str, home: str) -> Iterable[bytes]:
    """Return S3's answer to a request signed for a region other than the bucket's."""
    words = f"The authorization header is malformed; the region '{signed_for}' is wrong; expecting '{home}'"
    error = f"<Code>AuthorizationHeaderMalformed</Code><Message>{words}</Message><Region>{home}</Region>"
    data = f"<?xml version='1.0'?><Error>{error}</Error>".encode()
    headers = {"Content-Type": "application/xml", "Content-Length": str(len(data)), "x-amz-bucket-region": home}
    start("400 Bad Request", [*headers.items()])
    return [] if environ["REQUEST_METHOD"] == "HEAD" else [data]


def _form(environ: dict[str, Any]) -> dict[str, str]:
    if not environ.get("CONTENT_TYPE", "").startswith("application/x-www-form-urlencoded"):
        return {}
    body = environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
    environ["wsgi.input"] = io.BytesIO(body)
    return {key: values[0] for key, values in parse_qs(body.decode(), keep_blank_values=True).items()}


def _hang_up(environ: dict[str, Any]) -> Iterable[bytes]:
    environ["werkzeug.socket"].shutdown(socket.SHUT_RDWR)
    raise ConnectionAbortedError


def _xml_error(
    start: Callable[..., Any], code: str, message: str, root: str = "Response", status: int = 503
) -> Iterable[bytes]:
    error = f"<Code>{code}</Code><Message>{message}</Message>"
    if root == "Response":
        error = f"<Errors><Error>{error}</Error></Errors>"
    return _xml(start, f"<{root}>{error}<RequestID>fake</RequestID></{root}>", f"{status} Refused")


def _xml(start: Callable[..., Any], text: str, status: str = "200 OK") -> Iterable[bytes]:
    data = f"<?xml version='1.0'?>{text}".encode()
    start(status, [("Content-Type", "text/xml"), ("Content-Length", str(len(data)))])
    return [data]


def _json(start: Callable[..., Any], status: str, value: object) -> Iterable[bytes]:
    data = json.dumps(value).encode()
    start(status, [("Content-Type", "application/x-amz-json-1.1"), ("Content-Length", str(len(data)))])
    return [data]


def zone_ids() -> dict[str, str]:
    """Return the id of each zone as in DescribeAvailabilityZones."""
    from moto.ec2.models.availability_zones_and_regions import RegionsAndZonesBackend

    return {zone.name: zone.zone_id for zones in RegionsAndZonesBackend.zones.values() for zone in zones}
