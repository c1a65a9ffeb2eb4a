"""Google Cloud for a run: labelled instances and disks, reasons of ends; a network and an identity."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace

from launcher.clouds.base import (
    Caller,
    Finding,
    Machine,
    MachineState,
    Place,
    Thing,
    refuse_wrong,
    wrong_of,
)
from launcher.clouds.gce_calls import GoogleCalls, errors_named, missing_is_fine
from launcher.clouds.gce_identity import NodeIdentity
from launcher.clouds.gce_inventory import PREEMPTED, belongs_to, described, disk_of, end_ms, instance_of
from launcher.clouds.gce_named import GoogleNames
from launcher.clouds.gce_network import RunNetwork
from launcher.clouds.gce_services import COMPUTE, IAM, Answer
from launcher.clouds.labels import PREFIX, run_name, slug
from launcher.job.company import NOTHING_NAMED, Named

HOME_REGION = "us-central1"

NOT_YET = frozenset({"RESOURCE_IN_USE_BY_ANOTHER_RESOURCE", "resourceInUseByAnotherResource", "resourceNotReady"})


REMOVED_IN_ORDER = ("disk", "firewall", "subnet", "network", "identity")
"""Kinds of resources in the order of their removal: a network goes after its firewalls and subnets."""


class GceApi:
    """One Google Cloud project."""

    cloud, home = "gcp", HOME_REGION

    def __init__(self, environ: Mapping[str, str] = os.environ, calls: GoogleCalls | None = None) -> None:
        self.calls = calls or GoogleCalls(environ)
        self._names = GoogleNames(self.calls.ask)
        self._network = RunNetwork(self.calls)
        self._identity = NodeIdentity(self.calls)

    def caller(self) -> Caller:
        with errors_named("gcp credentials"):
            credentials, project = self.calls.credentials()
            identity = getattr(credentials, "service_account_email", "") or getattr(credentials, "account", "") or ""
            if not identity and not self.calls.is_elsewhere:
                found = self.calls.call("GET", "https://openidconnect.googleapis.com/v1/userinfo")
                identity = str(found.get("email", ""))
        return Caller(account=project, identity=identity, owner=slug(identity.partition("@")[0] or project))

    def regions(self) -> Sequence[str]:
        with errors_named("gcp compute regions.list"):
            return sorted(one["name"] for one in self.calls.list(COMPUTE, "/regions"))

    def machines(self, region: str, *, owner: str | None = None, run: str | None = None) -> Sequence[Machine]:
        with errors_named(f"gcp compute instances.aggregatedList, {region}"):
            found = [instance_of(one) for one in self.calls.labelled("instances", owner, run)]
        return [one for one in found if one.region == region and belongs_to(one, owner, run)]

    def end_of(self, machine: Machine) -> Machine:
        """Return the VM's end. A deleted preempted instance is not listed, but the preemption's operation is."""
        with errors_named(f"gcp compute operations of {machine.id}"):
            # Newest first and one page only: a project has many operations.
            newest = {"orderBy": "creationTimestamp desc", "maxResults": "500"}
            page = self.calls.ask("GET", COMPUTE, f"/zones/{machine.zone}/operations", query=newest)
            operations = [
                one for one in page.get("items", ()) if one.get("targetLink", "").rpartition("/")[2] == machine.id
            ]
        ends = [one for one in operations if one["operationType"] in (PREEMPTED, "delete", "stop")]
        preempted = [one for one in ends if one["operationType"] == PREEMPTED]
        last = max(preempted or ends or [{}], key=lambda one: one.get("insertTime", ""))
        reason = f"{last['operationType']}: {last.get('statusMessage', '')}".rstrip(": ") if last else ""
        return replace(
            machine,
            state=MachineState.GONE,
            ended_ms=end_ms(last) or machine.ended_ms,
            reason=reason or machine.reason or "Google Cloud does not list it any more",
            reclaimed=bool(preempted) or machine.reclaimed,
        )

    def things(self, region: str, *, owner: str | None = None, run: str | None = None) -> Sequence[Thing]:
        with errors_named(f"gcp compute disks.aggregatedList, {region}"):
            found = [disk_of(one) for one in self.calls.labelled("disks", owner, run)]
            found = [one for one in found if one.region == region]
            for one in self.calls.list(COMPUTE, f"/regions/{region}/subnetworks"):
                if one["name"].startswith(f"{PREFIX}-"):
                    found.append(described("subnet", region, one, run))
            if region == HOME_REGION:
                for kind, path in (("firewall", "/global/firewalls"), ("network", "/global/networks")):
                    found += [
                        described(kind, "", one, run)
                        for one in self.calls.list(COMPUTE, path)
                        if one["name"].startswith(f"{PREFIX}-")
                    ]
        if region == HOME_REGION:
            with errors_named("gcp iam serviceAccounts.list"):
                accounts = list(self.calls.list(IAM, "/serviceAccounts", items="accounts"))
            found += [
                described("identity", "", {**one, "name": one["email"]}, run)
                for one in accounts
                if one["email"].startswith(f"{PREFIX}-")
            ]
        return [one for one in found if belongs_to(one, owner, run)]

    def end(self, machines: Sequence[Machine]) -> None:
        for machine in machines:
            with errors_named(f"gcp compute instances.delete {machine.id}"), missing_is_fine():
                self.calls.ask("DELETE", COMPUTE, f"/zones/{machine.zone}/instances/{machine.id}")

    def remove(self, things: Sequence[Thing]) -> Sequence[Thing]:
        """Remove firewalls before subnets before networks, in any input order."""
        order = REMOVED_IN_ORDER
        known = sorted((one for one in things if one.kind in order), key=lambda one: order.index(one.kind))
        left = [one for one in things if one.kind not in order]
        return left + [one for one in known if not self._remove(one)]

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
    ) -> Place:
        name = run_name(run)
        refuse_wrong([*self.check_identity(named), *self.check_network(region, named, ssh_from)])
        if not named.network:
            self._network.prepare(region, run, owner, ssh_from)
        identity = named.identity
        if not identity:
            with errors_named(f"gcp iam service account of {name}"):
                identity = self._identity.prepare(run, owner, buckets, models)
        return Place(
            cloud="gcp",
            region=region,
            group="" if named.network else name,
            identity=identity,
            network=named.network or name,
            subnets=named.subnets,
            ssh_from=ssh_from if named.is_reached_from_here else "",
            named=named,
        )

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

    def open_rules(self, place: Place) -> Sequence[str]:
        if place.named.network:
            return wrong_of(self.check_network(place.region, place.named, place.ssh_from))
        return self._network.missing_rules(place)

    def _remove(self, thing: Thing) -> bool:
        path = {
            "disk": f"/zones/{thing.id.partition('/')[0]}/disks/{thing.id.partition('/')[2]}",
            "firewall": f"/global/firewalls/{thing.id}",
            "subnet": f"/regions/{thing.region}/subnetworks/{thing.id}",
            "network": f"/global/networks/{thing.id}",
        }
        with errors_named(f"gcp {thing.kind} {thing.id}"), missing_is_fine():
            try:
                if thing.kind == "identity":
                    self._identity.remove(thing.id)
                else:
                    self.calls.finish(self.calls.ask("DELETE", COMPUTE, path[thing.kind]))
            except Answer as answer:
                if answer.reason in NOT_YET or "in use" in answer.text or "being used" in answer.text:
                    return False
                raise
        return True
