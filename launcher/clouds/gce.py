"""Google Cloud for a run: labelled instances and disks, reasons of ends; a network and an identity."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace

from launcher.clouds.base import (
    EVERYWHERE,
    CallerIdentity,
    CloudUnreachable,
    Finding,
    Instance,
    InstanceState,
    RegionSetup,
    Resource,
    refuse_wrong,
    wrong_of,
)
from launcher.clouds.gce_calls import GoogleCalls, errors_named, missing_is_fine
from launcher.clouds.gce_identity import NodeIdentity
from launcher.clouds.gce_inventory import PREEMPTED, belongs_to, described, disk_of, first_end_ms, instance_of, is_end
from launcher.clouds.gce_named import GoogleNames
from launcher.clouds.gce_network import RunNetwork
from launcher.clouds.gce_services import COMPUTE, IAM, Answer
from launcher.clouds.labels import PREFIX, run_name, slug
from launcher.job.company import NOTHING_NAMED, Named

NOT_YET = frozenset({"RESOURCE_IN_USE_BY_ANOTHER_RESOURCE", "resourceInUseByAnotherResource", "resourceNotReady"})


UNNAMED = "default"
"""What google-auth calls the service account of a VM of Google Cloud until the first token came with its name."""

REMOVED_IN_ORDER = ("disk", "firewall", "subnet", "network", "identity")
"""Kinds of resources in the order of their removal: a network goes after its firewalls and subnets."""


class GceApi:
    """The API of one Google Cloud project."""

    cloud, home = "gcp", EVERYWHERE

    def __init__(self, environ: Mapping[str, str] = os.environ, calls: GoogleCalls | None = None) -> None:
        self.calls = calls or GoogleCalls(environ)
        self._names = GoogleNames(self.calls.ask)
        self._network = RunNetwork(self.calls)
        self._identity = NodeIdentity(self.calls)

    def caller(self) -> CallerIdentity:
        with errors_named("gcp credentials"):
            credentials, project = self.calls.credentials()
            if getattr(credentials, "service_account_email", "") == UNNAMED:
                self.calls.refresh(credentials)
            identity = getattr(credentials, "service_account_email", "") or getattr(credentials, "account", "") or ""
            if identity == UNNAMED:
                raise CloudUnreachable(
                    "Google's metadata did not name the service account of this VM; it is asked again"
                )
            if not identity and not self.calls.is_elsewhere:
                user = self.calls.call("GET", "https://openidconnect.googleapis.com/v1/userinfo")
                identity = str(user.get("email", ""))
        return CallerIdentity(account=project, identity=identity, owner=slug(identity.partition("@")[0] or project))

    def regions(self) -> Sequence[str]:
        with errors_named("gcp compute regions.list"):
            return sorted(region["name"] for region in self.calls.list(COMPUTE, "/regions"))

    def instances(self, region: str, *, owner: str | None = None, run: str | None = None) -> Sequence[Instance]:
        if region == self.home:
            return []
        with errors_named(f"gcp compute instances.aggregatedList, {region}"):
            instances = [instance_of(vm) for vm in self.calls.labelled("instances", owner, run)]
        return [instance for instance in instances if instance.region == region and belongs_to(instance, owner, run)]

    def end_of(self, instance: Instance) -> Instance:
        """Return the VM's end. A deleted preempted instance is not listed, but the preemption's operation is.

        A failed operation ended nothing, and an operation from before the VM's start ended an earlier VM of the name.
        """
        with errors_named(f"gcp compute operations of {instance.id}"):
            # Newest first and one page only: a project has many operations.
            newest = {"orderBy": "creationTimestamp desc", "maxResults": "500"}
            page = self.calls.ask("GET", COMPUTE, f"/zones/{instance.zone}/operations", query=newest)
            operations = [
                operation
                for operation in page.get("items", ())
                if operation.get("targetLink", "").rpartition("/")[2] == instance.id
            ]
        ends = [operation for operation in operations if is_end(operation, instance.launched_ms)]
        preempted = [operation for operation in ends if operation["operationType"] == PREEMPTED]
        last = max(preempted or ends or [{}], key=lambda operation: operation.get("insertTime", ""))
        reason = f"{last['operationType']}: {last.get('statusMessage', '')}".rstrip(": ") if last else ""
        return replace(
            instance,
            state=InstanceState.GONE,
            ended_ms=first_end_ms(last, ends, instance.notice_ms) or instance.ended_ms,
            reason=reason or instance.reason or "Google Cloud does not list it any more",
            reclaimed=bool(preempted) or instance.reclaimed,
        )

    def resources(self, region: str, *, owner: str | None = None, run: str | None = None) -> Sequence[Resource]:
        resources = self._of_no_region(run) if region == self.home else self._in_region(region, owner, run)
        return [resource for resource in resources if belongs_to(resource, owner, run)]

    def _in_region(self, region: str, owner: str | None, run: str | None) -> list[Resource]:
        with errors_named(f"gcp compute disks.aggregatedList, {region}"):
            disks = [disk_of(disk) for disk in self.calls.labelled("disks", owner, run)]
            subnets = [
                described("subnet", region, subnet, run)
                for subnet in self.calls.list(COMPUTE, f"/regions/{region}/subnetworks")
                if subnet["name"].startswith(f"{PREFIX}-")
            ]
        return [*(disk for disk in disks if disk.region == region), *subnets]

    def _of_no_region(self, run: str | None) -> list[Resource]:
        resources = []
        with errors_named("gcp compute networks and firewalls"):
            for kind, path in (("firewall", "/global/firewalls"), ("network", "/global/networks")):
                resources += [
                    described(kind, "", entry, run)
                    for entry in self.calls.list(COMPUTE, path)
                    if entry["name"].startswith(f"{PREFIX}-")
                ]
        with errors_named("gcp iam serviceAccounts.list"):
            accounts = list(self.calls.list(IAM, "/serviceAccounts", key="accounts"))
        return resources + [
            described("identity", "", {**account, "name": account["email"]}, run)
            for account in accounts
            if account["email"].startswith(f"{PREFIX}-")
        ]

    def end(self, instances: Sequence[Instance]) -> None:
        for instance in instances:
            with errors_named(f"gcp compute instances.delete {instance.id}"), missing_is_fine():
                self.calls.ask("DELETE", COMPUTE, f"/zones/{instance.zone}/instances/{instance.id}")

    def remove(self, resources: Sequence[Resource]) -> Sequence[Resource]:
        """Remove firewalls before subnets before networks, in any input order."""
        order = REMOVED_IN_ORDER
        removable = sorted(
            (resource for resource in resources if resource.kind in order),
            key=lambda resource: order.index(resource.kind),
        )
        skipped = [resource for resource in resources if resource.kind not in order]
        return skipped + [resource for resource in removable if not self._remove(resource)]

    def prepare(
        self,
        region: str,
        *,
        run: str,
        owner: str,
        ssh_from: str,
        buckets: Sequence[str],
        models: Sequence[str] = (),
        named: Named = NOTHING_NAMED,
    ) -> RegionSetup:
        name = run_name(run)
        refuse_wrong([*self.check_identity(named), *self.check_network(region, named, ssh_from)])
        if not named.network:
            self._network.prepare(region, run, owner, ssh_from)
        identity = named.identity
        if not identity:
            with errors_named(f"gcp iam service account of {name}"):
                identity = self._identity.prepare(run, owner, buckets, models)
        return RegionSetup(
            cloud="gcp",
            region=region,
            group="" if named.network else name,
            identity=identity,
            network=named.network or name,
            subnets=named.subnets,
            ssh_from=ssh_from if named.is_reached_from_here else "",
            named=named,
        )

    def check_launches(self) -> None:
        """Check nothing: SkyPilot makes no call of its own to Google Cloud before a launch."""

    def check_identity(self, named: Named) -> Sequence[Finding]:
        if not named.identity:
            return []
        with errors_named(f"gcp iam serviceAccounts.get {named.identity}"):
            return [self._names.look_at_account(named.identity)]

    def check_network(self, region: str, named: Named, ssh_from: str) -> Sequence[Finding]:
        if not named.network:
            return []
        with errors_named(f"gcp compute network {named.network}, {region}"):
            return self._names.look_at_network(region, named, ssh_from if named.is_reached_from_here else "")

    def open_rules(self, setup: RegionSetup) -> Sequence[str]:
        if setup.named.network:
            return wrong_of(self.check_network(setup.region, setup.named, setup.ssh_from))
        return self._network.missing_rules(setup)

    def _remove(self, resource: Resource) -> bool:
        path = {
            "disk": f"/zones/{resource.id.partition('/')[0]}/disks/{resource.id.partition('/')[2]}",
            "firewall": f"/global/firewalls/{resource.id}",
            "subnet": f"/regions/{resource.region}/subnetworks/{resource.id}",
            "network": f"/global/networks/{resource.id}",
        }
        with errors_named(f"gcp {resource.kind} {resource.id}"), missing_is_fine():
            try:
                if resource.kind == "identity":
                    self._identity.remove(resource.id)
                else:
                    self.calls.finish(self.calls.ask("DELETE", COMPUTE, path[resource.kind]))
            except Answer as answer:
                if answer.reason in NOT_YET or "in use" in answer.text or "being used" in answer.text:
                    return False
                raise
        return True
