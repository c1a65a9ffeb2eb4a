"""Google Cloud's own API for a run: labelled instances and disks, reasons of ends; a network and an identity.

Plain REST with google-auth, because the calls are few, and a poll every other second should not need a client library.
`SPOTRL_GCP_COMPUTE_ENDPOINT`, `SPOTRL_GCP_IAM_ENDPOINT` and `SPOTRL_GCP_RESOURCE_MANAGER_ENDPOINT` name another server,
which receives no credentials.

A run has its own network, `spotrl-RUN`, with a subnet in each used region. Everything inside the network is our node,
so the firewall needs no tags. Networks and firewalls carry no labels; the owner is in their description.
A node's identity may terminate instances of its run and use its prefix of the buckets, by a role of few permissions and
by conditions.
"""

import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import datetime
from threading import Lock, local
from typing import Any

from engine.events import Market
from launcher.clouds.base import (
    NODE_LABEL,
    OWNER_LABEL,
    RUN_LABEL,
    Caller,
    CloudRefused,
    CloudUnreachable,
    Finding,
    Machine,
    MachineState,
    Place,
    Thing,
    refuse_anothers,
    refuse_wrong,
    wrong_of,
)
from launcher.clouds.gce_named import GoogleNames
from launcher.clouds.gce_services import COMPUTE, IAM, PROJECTS, Answer
from launcher.clouds.labels import PREFIX, bucket_of, run_name, slug
from launcher.job.company import NOTHING_NAMED, Named
from launcher.job.schema import SLOTS_IN_NAMES
from launcher.market.refusals import advice_on

HOME_REGION = "us-central1"

PROJECT = "GOOGLE_CLOUD_PROJECT"

STATES: Mapping[str, MachineState] = {
    "PROVISIONING": MachineState.PENDING,
    "STAGING": MachineState.PENDING,
    "RUNNING": MachineState.RUNNING,
    "REPAIRING": MachineState.RUNNING,
}
"""States by Google status. Every other status means stopping; a deleted instance is not listed."""

ROLE_ID = "spotrlNode"
ROLE_PERMISSIONS = (
    "compute.instances.delete",
    "compute.instances.get",
    "compute.instances.list",
    "compute.zoneOperations.get",  # SkyPilot's timer on the VM waits for the deletion
)
"""One role for all runs of a project: a deleted custom role keeps its name for weeks. Conditions narrow the role to
a run."""

INSIDE = "10.128.0.0/9"
"""Address range of the run networks' subnets, reachable only from inside the same network."""

SUBNETS = 128

CALL_SECONDS = (1.5, 3.0)
"""Seconds to connect and to answer. A call is tried twice and takes at most 10 s."""

TOKEN_SECONDS = 4.0

PREEMPTED, NOTICE_MS = "compute.instances.preempted", 30_000
"""The operation of a preemption, and the longest time that a VM continues after the operation's start."""

WAIT_SECONDS = 8.0
"""Longest wait of one call for an operation. A longer operation is found finished by a later call."""

NEW_ACCOUNT_SECONDS = 120.0
"""Time after which a new service account is known everywhere, according to Google."""

ASK_LESS = frozenset({408, 429, 500, 502, 503, 504})
NOT_YET = frozenset({"RESOURCE_IN_USE_BY_ANOTHER_RESOURCE", "resourceInUseByAnotherResource", "resourceNotReady"})


class GceApi:
    """One Google Cloud project."""

    cloud, home = "gcp", HOME_REGION

    def __init__(self, environ: Mapping[str, str] = os.environ) -> None:
        self._environ = environ
        self._lock = Lock()
        self._kept = local()
        self._names = GoogleNames(self._ask)
        self._known: tuple[Any, str] | None = None
        self._bound_first: dict[str, float] = {}
        """By account: time of the first binding that failed because the account was unknown (monotonic seconds)."""

    def caller(self) -> Caller:
        with _said("gcp credentials"):
            credentials, project = self._credentials()
            identity = getattr(credentials, "service_account_email", "") or getattr(credentials, "account", "") or ""
            if not identity and not self._environ.get(COMPUTE[0]):
                found = self._call("GET", "https://openidconnect.googleapis.com/v1/userinfo")
                identity = str(found.get("email", ""))
        return Caller(account=project, identity=identity, owner=slug(identity.partition("@")[0] or project))

    def regions(self) -> Sequence[str]:
        with _said("gcp compute regions.list"):
            return sorted(one["name"] for one in self._list(COMPUTE, "/regions"))

    def machines(self, region: str, *, owner: str | None = None, run: str | None = None) -> Sequence[Machine]:
        with _said(f"gcp compute instances.aggregatedList, {region}"):
            found = [_machine(one) for one in self._labelled("instances", owner, run)]
        return [one for one in found if one.region == region and _is_of(one, owner, run)]

    def end_of(self, machine: Machine) -> Machine:
        """Return the VM's end. A deleted preempted instance is not listed, but the preemption's operation is."""
        with _said(f"gcp compute operations of {machine.id}"):
            # Newest first and one page only: a project has many operations.
            newest = {"orderBy": "creationTimestamp desc", "maxResults": "500"}
            page = self._ask("GET", COMPUTE, f"/zones/{machine.zone}/operations", query=newest)
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
            ended_ms=_end_ms(last) or machine.ended_ms,
            reason=reason or machine.reason or "Google Cloud does not list it any more",
            reclaimed=bool(preempted) or machine.reclaimed,
        )

    def things(self, region: str, *, owner: str | None = None, run: str | None = None) -> Sequence[Thing]:
        with _said(f"gcp compute disks.aggregatedList, {region}"):
            found = [_disk(one) for one in self._labelled("disks", owner, run)]
            found = [one for one in found if one.region == region]
            for one in self._list(COMPUTE, f"/regions/{region}/subnetworks"):
                if one["name"].startswith(f"{PREFIX}-"):
                    found.append(_described("subnet", region, one, run))
            if region == HOME_REGION:
                for kind, path in (("firewall", "/global/firewalls"), ("network", "/global/networks")):
                    found += [
                        _described(kind, "", one, run)
                        for one in self._list(COMPUTE, path)
                        if one["name"].startswith(f"{PREFIX}-")
                    ]
        if region == HOME_REGION:
            with _said("gcp iam serviceAccounts.list"):
                accounts = self._list(IAM, "/serviceAccounts", items="accounts")
            found += [
                _described("identity", "", {**one, "name": one["email"]}, run)
                for one in accounts
                if one["email"].startswith(f"{PREFIX}-")
            ]
        return [one for one in found if _is_of(one, owner, run)]

    def end(self, machines: Sequence[Machine]) -> None:
        for machine in machines:
            with _said(f"gcp compute instances.delete {machine.id}"), _missing_is_fine():
                self._ask("DELETE", COMPUTE, f"/zones/{machine.zone}/instances/{machine.id}")

    def remove(self, things: Sequence[Thing]) -> Sequence[Thing]:
        """Remove firewalls before subnets before networks, in any input order."""
        order = ("disk", "firewall", "subnet", "network", "identity")
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
        name, whose = run_name(run), json.dumps({"run": run, "owner": owner})
        refuse_wrong([*self.check_identity(named), *self.check_network(region, named, ssh_from)])
        if not named.network:
            self._prepare_network(region, run, owner, ssh_from)
        identity = named.identity
        if not identity:
            with _said(f"gcp iam service account of {name}"):
                identity = self._prepare_identity(run, whose, buckets, models)
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
        with _said(f"gcp iam serviceAccounts.get {named.identity}"):
            return [self._names.look_at_account(named.identity)]

    def check_network(self, region: str, named: Named, ssh_from: str) -> Sequence[Finding]:
        if not named.network:
            return []
        with _said(f"gcp compute network {named.network}, {region}"):
            return self._names.look_at_network(region, named, ssh_from if named.is_reached_from_here else "")

    def _prepare_network(self, region: str, run: str, owner: str, ssh_from: str) -> None:
        name, whose = run_name(run), json.dumps({"run": run, "owner": owner})
        with _said(f"gcp compute network {name}"):
            network = self._made(
                "/global/networks", name, {"autoCreateSubnetworks": False, "description": whose}, global_wait=True
            )
            refuse_anothers(f"gcp network {name}", run, owner, _described("network", "", network, None).owner)
            self._prepare_subnet(region, name, network["selfLink"], whose)
            self._prepare_firewall(f"{name}-inside", network["selfLink"], whose, INSIDE, {"IPProtocol": "all"})
            ssh = {"IPProtocol": "tcp", "ports": ["22"]}
            self._prepare_firewall(f"{name}-ssh", network["selfLink"], whose, ssh_from, ssh)

    def open_rules(self, place: Place) -> Sequence[str]:
        if place.named.network:
            return wrong_of(self.check_network(place.region, place.named, place.ssh_from))
        missing = []
        wanted = {
            f"{place.group}-inside": f"all traffic from {INSIDE}",
            f"{place.group}-ssh": f"tcp 22 (SSH) from {place.ssh_from}",
        }
        with _said("gcp compute firewalls.list"):
            found = {one["name"]: one for one in self._list(COMPUTE, "/global/firewalls")}
        for name, words in wanted.items():
            rule = found.get(name)
            if rule is None or rule.get("disabled"):
                missing.append(f"network {place.network} lacks the firewall rule {name}: {words}")
            elif name.endswith("-ssh") and rule.get("sourceRanges") != [place.ssh_from]:
                missing.append(
                    f"firewall rule {name} lets SSH in from {rule.get('sourceRanges')}, not {place.ssh_from}"
                )
        return missing

    # --- parts ------------------------------------------------------------------------------------

    def _prepare_subnet(self, region: str, name: str, network: str, whose: str) -> None:
        path = f"/regions/{region}/subnetworks"
        if self._find(f"{path}/{name}") is not None:
            return
        taken = {
            one.get("ipCidrRange")
            for one in self._everywhere("subnetworks")
            if one.get("network", "").rpartition("/")[2] == name
        }
        for number in range(SUBNETS):
            cidr = f"10.{128 + number}.0.0/20"
            if cidr in taken:
                continue
            body = {"name": name, "network": network, "ipCidrRange": cidr, "description": whose}
            with _already_is_fine():
                self._done(self._ask("POST", COMPUTE, path, body))
            return

    def _prepare_firewall(self, name: str, network: str, whose: str, source: str, allowed: Mapping[str, Any]) -> None:
        found = self._find(f"/global/firewalls/{name}")
        if found is not None and found.get("sourceRanges") == [source] and not found.get("disabled"):
            return
        body = {
            "name": name,
            "network": network,
            "description": whose,
            "direction": "INGRESS",
            "allowed": [allowed],
            "sourceRanges": [source],
            "disabled": False,
        }
        if found is None:
            with _already_is_fine():
                self._done(self._ask("POST", COMPUTE, "/global/firewalls", body))
        else:
            self._done(self._ask("PATCH", COMPUTE, f"/global/firewalls/{name}", body))

    def _prepare_identity(self, run: str, whose: str, buckets: Sequence[str], models: Sequence[str]) -> str:
        _, project = self._credentials()
        account = run_name(run, limit=30)
        email = f"{account}@{project}.iam.gserviceaccount.com"
        with _already_is_fine():
            body = {"accountId": account, "serviceAccount": {"displayName": f"node of {run}", "description": whose}}
            self._ask("POST", IAM, "/serviceAccounts", body)
        role = f"projects/{project}/roles/{ROLE_ID}"
        self._prepare_role()
        self._bind(email, node_conditions(run, role, buckets, models))
        return email

    def _prepare_role(self) -> None:
        """Make the role of nodes if missing. An existing role is never changed.

        Raises CloudRefused with an administrator's command if the role is missing and may not be made here, was
        deleted, or has different permissions. A caller with the right to change the role could give its permissions to
        a node, and take them.
        """
        _, project = self._credentials()
        of_project = f"{ROLE_ID} --project {project}"
        permissions = ",".join(ROLE_PERMISSIONS)
        try:
            found = self._ask("GET", IAM, f"/roles/{ROLE_ID}")
        except Answer as answer:
            if answer.status != 404:
                raise
            self._make_role(f"gcloud iam roles create {of_project} --title 'spotrl node' --permissions {permissions}")
            return
        if found.get("deleted"):
            raise CloudRefused(
                f"the role {ROLE_ID} of project {project} was deleted; get it back: "
                f"gcloud iam roles undelete {of_project}"
            )
        allowed = set(found.get("includedPermissions", ()))
        if allowed != set(ROLE_PERMISSIONS):
            differs = ", ".join(sorted(allowed ^ set(ROLE_PERMISSIONS)))
            raise CloudRefused(
                f"the role {ROLE_ID} of project {project} is not as nodes need it (it differs in {differs}); set it: "
                f"gcloud iam roles update {of_project} --permissions {permissions}"
            )

    def _make_role(self, command: str) -> None:
        about = {
            "title": "spotrl node",
            "description": "May end instances; bound to those of one run by a condition",
            "includedPermissions": list(ROLE_PERMISSIONS),
            "stage": "GA",
        }
        try:
            with _already_is_fine():
                self._ask("POST", IAM, "/roles", {"roleId": ROLE_ID, "role": about})
        except Answer as answer:
            if answer.status != 403:
                raise
            raise CloudRefused(
                f"the role {ROLE_ID} is not there, and these credentials may not make it; an administrator makes it "
                f"once for the project: {command}"
            ) from None

    def _bind(self, email: str, wanted: Mapping[str, tuple[str, str]] | None) -> None:
        """Give an account exactly these roles (condition title -> role, expression); None removes all roles."""
        member = f"serviceAccount:{email}"
        for _ in range(3):
            options = {"options": {"requestedPolicyVersion": 3}}
            policy = self._ask("POST", PROJECTS, ":getIamPolicy", options)
            before = policy.get("bindings", [])
            bindings = [one for one in before if member not in one.get("members", ())]
            shared = [one for one in before if member in one.get("members", ()) and len(one["members"]) > 1]
            bindings += [{**one, "members": [m for m in one["members"] if m != member]} for one in shared]
            bindings += [
                {"role": role, "members": [member], "condition": {"title": title, "expression": expression}}
                for title, (role, expression) in (wanted or {}).items()
            ]
            if sorted(map(_canonical, bindings)) == sorted(map(_canonical, before)):
                return
            try:
                policy = {**policy, "version": 3, "bindings": bindings}
                self._ask("POST", PROJECTS, ":setIamPolicy", {"policy": policy})
                return
            except Answer as answer:
                if answer.status == 400 and wanted and "does not exist" in answer.text and self._is_new(email):
                    raise CloudUnreachable(
                        f"gcp projects.setIamPolicy: Google does not know {email} yet; it is asked again"
                    ) from None
                if answer.status != 409:  # 409: the policy changed in between; read again
                    raise
        raise CloudUnreachable(
            "gcp projects.setIamPolicy: others keep changing the project's policy; it is asked again"
        )

    def _is_new(self, email: str) -> bool:
        """Return whether an account's first binding is recent enough that a policy may not know the account yet."""
        return time.monotonic() - self._bound_first.setdefault(email, time.monotonic()) < NEW_ACCOUNT_SECONDS

    def _remove(self, thing: Thing) -> bool:
        path = {
            "disk": f"/zones/{thing.id.partition('/')[0]}/disks/{thing.id.partition('/')[2]}",
            "firewall": f"/global/firewalls/{thing.id}",
            "subnet": f"/regions/{thing.region}/subnetworks/{thing.id}",
            "network": f"/global/networks/{thing.id}",
        }
        with _said(f"gcp {thing.kind} {thing.id}"), _missing_is_fine():
            try:
                if thing.kind == "identity":
                    self._bind(thing.id, None)
                    self._ask("DELETE", IAM, f"/serviceAccounts/{thing.id}")
                else:
                    self._done(self._ask("DELETE", COMPUTE, path[thing.kind]))
            except Answer as answer:
                if answer.reason in NOT_YET or "in use" in answer.text or "being used" in answer.text:
                    return False
                raise
        return True

    def _made(self, path: str, name: str, body: Mapping[str, Any], *, global_wait: bool) -> dict[str, Any]:
        found = self._find(f"{path}/{name}")
        if found is None:
            with _already_is_fine():
                self._done(self._ask("POST", COMPUTE, path, {"name": name, **body}))
            found = self._find(f"{path}/{name}")
        if found is None:
            raise CloudUnreachable(f"gcp is making {name}; it is asked again")
        return found

    def _find(self, path: str) -> dict[str, Any] | None:
        try:
            return self._ask("GET", COMPUTE, path)
        except Answer as answer:
            if answer.status == 404:
                return None
            raise

    def _done(self, operation: Mapping[str, Any]) -> None:
        """Wait at most `WAIT_SECONDS` for an operation."""
        link = operation.get("selfLink", "")
        path = link.partition("/projects/")[2].partition("/")[2]
        until = time.monotonic() + WAIT_SECONDS
        while operation.get("status") not in (None, "DONE") and path:
            if time.monotonic() > until:
                raise CloudUnreachable(f"gcp is still at {operation.get('operationType')}; it is asked again")
            time.sleep(0.3)
            operation = self._ask("GET", COMPUTE, f"/{path}")
        for error in operation.get("error", {}).get("errors", ()):
            raise Answer(operation.get("httpErrorStatusCode", 400), error.get("code", ""), error.get("message", ""))

    # --- asking -----------------------------------------------------------------------------------

    def _labelled(self, what: str, owner: str | None, run: str | None) -> Iterator[dict[str, Any]]:
        terms = [f"labels.{RUN_LABEL}:*" if run is None else f"labels.{RUN_LABEL}={run}"]
        if owner is not None:
            terms.append(f"labels.{OWNER_LABEL}={owner}")
        text = terms[0] if len(terms) == 1 else " ".join(f"({term})" for term in terms)
        return (one for one in self._everywhere(what, filter=text) if RUN_LABEL in one.get("labels", {}))

    def _everywhere(self, what: str, filter: str = "") -> Iterator[dict[str, Any]]:
        for page in self._pages(COMPUTE, f"/aggregated/{what}", {"filter": filter} if filter else {}):
            for scope in page.get("items", {}).values():
                yield from scope.get(what, ())

    def _list(
        self, where: tuple[str, str, str], path: str, items: str = "items", filter: str = ""
    ) -> Iterator[dict[str, Any]]:
        for page in self._pages(where, path, {"filter": filter} if filter else {}):
            yield from page.get(items, ())

    def _pages(self, where: tuple[str, str, str], path: str, query: Mapping[str, str]) -> Iterator[dict[str, Any]]:
        token = ""
        while True:
            page = self._ask("GET", where, path, query={**query, **({"pageToken": token} if token else {})})
            yield page
            token = page.get("nextPageToken", "")
            if not token:
                return

    def _ask(
        self,
        method: str,
        where: tuple[str, str, str],
        path: str,
        body: Mapping[str, Any] | None = None,
        query: Mapping[str, str] | None = None,
    ) -> dict[str, Any]:
        variable, default, prefix = where
        _, project = self._credentials()
        base = self._environ.get(variable, "") or default
        return self._call(method, f"{base.rstrip('/')}{prefix.format(project=project)}{path}", body, query)

    def _call(
        self, method: str, url: str, body: Mapping[str, Any] | None = None, query: Mapping[str, str] | None = None
    ) -> dict[str, Any]:
        import requests

        session = self._session(method)
        for attempt in (1, 2):
            try:
                answer = session.request(method, url, json=body, params=query, timeout=CALL_SECONDS)
            except requests.exceptions.RequestException:
                if attempt == 2 or method == "POST":
                    raise
                continue
            if answer.status_code in ASK_LESS and attempt == 1 and method != "POST":
                time.sleep(0.5)
                continue
            break
        if answer.ok:
            return dict(answer.json()) if answer.content else {}
        raise _answer(answer)

    def _session(self, method: str) -> Any:
        """Return this thread's session, whose connections stay open between calls, and a new session for POST.

        A connection that died while idle fails the next call. Every call except POST is then repeated.
        """
        import requests

        kept = getattr(self._kept, "session", None)
        if kept is not None and method != "POST":
            return kept
        credentials, _ = self._credentials()
        if credentials is None:
            session = requests.Session()
        else:
            from google.auth.transport.requests import AuthorizedSession

            session = AuthorizedSession(credentials, refresh_timeout=TOKEN_SECONDS)
        if method != "POST":
            self._kept.session = session
        return session

    def _credentials(self) -> tuple[Any, str]:
        """Return the credentials and the project. Another server gets no credentials."""
        with self._lock:
            if self._known is None:
                named = self._environ.get(PROJECT, "")
                if self._environ.get(COMPUTE[0]):
                    self._known = (None, named)
                else:
                    import google.auth

                    credentials, project = google.auth.default(
                        scopes=["https://www.googleapis.com/auth/cloud-platform"]
                    )
                    self._known = (credentials, named or project or "")
                if not self._known[1]:
                    self._known = None
                    raise CloudRefused(
                        f"Google Cloud is asked on behalf of a project, and none is named; set {PROJECT}, or "
                        "`gcloud config set project PROJECT`"
                    )
            return self._known


def node_conditions(
    run: str, role: str, buckets: Sequence[str], models: Sequence[str] = ()
) -> dict[str, tuple[str, str]]:
    """Return the rights of a run's nodes: title -> role, and the condition that narrows the role.

    Instance names begin with the names of run and slot. The part before the slot must equal the run's name, or nodes of
    `exp` could delete nodes of `exp-2`. A job's name cannot contain the beginning of a slot's name.
    """
    of_run = (f'resource.name.extract("/instances/{{run}}{slot}") == "{run}"' for slot in SLOTS_IN_NAMES)
    grants = {
        "end-our-own": (role, " || ".join(('resource.type != "compute.googleapis.com/Instance"', *of_run))),
    }
    for number, url in enumerate(url for url in buckets if url.startswith("gs://")):
        bucket, prefix = bucket_of(url)
        name = f"projects/_/buckets/{bucket}"
        grants[f"keep-{number}"] = (
            "roles/storage.objectAdmin",
            f'resource.name == "{name}" || resource.name.startsWith("{name}/objects/{prefix}/")'
            if prefix
            else f'resource.name == "{name}" || resource.name.startsWith("{name}/objects/")',
        )
    for number, url in enumerate(url for url in models if url.startswith("gs://")):
        bucket, prefix = bucket_of(url)
        place = f'resource.name.startsWith("projects/_/buckets/{bucket}/objects/{prefix}/")'
        grants[f"read-{number}"] = ("roles/storage.objectViewer", place)
    return grants


def _machine(found: Mapping[str, Any]) -> Machine:
    labels = found.get("labels", {})
    zone = found["zone"].rpartition("/")[2]
    interface = (found.get("networkInterfaces") or [{}])[0]
    access = (interface.get("accessConfigs") or [{}])[0]
    state = STATES.get(found["status"], MachineState.STOPPING)
    spot = found.get("scheduling", {}).get("provisioningModel") == "SPOT" or found.get("scheduling", {}).get(
        "preemptible"
    )
    return Machine(
        cloud="gcp",
        region=zone.rpartition("-")[0],
        zone=zone,
        id=found["name"],
        name=labels.get(NODE_LABEL, found["name"]),
        run=labels.get(RUN_LABEL, ""),
        owner=labels.get(OWNER_LABEL, ""),
        state=state,
        market=Market.SPOT if spot else Market.ON_DEMAND,
        instance_type=found["machineType"].rpartition("/")[2],
        address=interface.get("networkIP", ""),
        public_address=access.get("natIP", ""),
        identity=next((one["email"] for one in found.get("serviceAccounts", ())), ""),
        launched_ms=_ms(found.get("lastStartTimestamp") or found.get("creationTimestamp")),
        ended_ms=_ms(found.get("lastStopTimestamp")) if state is MachineState.STOPPING else None,
        reason=found["status"] if state is MachineState.STOPPING else "",
    )


def _disk(found: Mapping[str, Any]) -> Thing:
    labels, zone = found.get("labels", {}), found["zone"].rpartition("/")[2]
    return Thing(
        cloud="gcp",
        region=zone.rpartition("-")[0],
        kind="disk",
        id=f"{zone}/{found['name']}",
        run=labels.get(RUN_LABEL, ""),
        owner=labels.get(OWNER_LABEL, ""),
        node=labels.get(NODE_LABEL, ""),
        size_gib=int(found.get("sizeGb", 0)) or None,
    )


def _described(kind: str, region: str, found: Mapping[str, Any], run: str | None) -> Thing:
    """Return the resource with the owner from its description, or from its name if the description is empty."""
    try:
        whose = json.loads(found.get("description") or "{}")
    except ValueError:
        whose = {}
    if run is not None and found["name"].partition("@")[0] in _names_of(run):
        whose = {"run": run, **whose}
    return Thing(
        cloud="gcp",
        region=region,
        kind=kind,
        id=found["name"],
        run=str(whose.get("run", "")),
        owner=str(whose.get("owner", "")),
    )


def _names_of(run: str) -> set[str]:
    name = run_name(run)
    return {name, f"{name}-inside", f"{name}-ssh", run_name(run, limit=30)}


def _is_of(one: Machine | Thing, owner: str | None, run: str | None) -> bool:
    return owner in (None, one.owner) and run in (None, one.run)


def _canonical(binding: Mapping[str, Any]) -> str:
    return json.dumps(binding, sort_keys=True)


def _end_ms(operation: Mapping[str, Any]) -> int | None:
    """Return the time at which billing of a VM stopped. A preemption's operation records the start of the notice."""
    begun_ms = _ms(operation.get("insertTime"))
    if begun_ms is not None and operation["operationType"] == PREEMPTED:
        return begun_ms + NOTICE_MS
    return _ms(operation.get("endTime")) or begun_ms


def _ms(text: str | None) -> int | None:
    return round(datetime.fromisoformat(text).timestamp() * 1000) if text else None


# --- errors -------------------------------------------------------------------------------------------


def _answer(answer: Any) -> Answer:
    try:
        error = answer.json().get("error", {})
    except ValueError:
        error = {}
    if not isinstance(error, dict):
        error = {}
    reasons = [str(one.get("reason", "")) for one in error.get("errors", ())]
    return Answer(answer.status_code, next(iter(reasons), "") or str(error.get("status", "")), error.get("message", ""))


@contextmanager
def _missing_is_fine() -> Iterator[None]:
    try:
        yield
    except Answer as answer:
        if answer.status != 404:
            raise


@contextmanager
def _already_is_fine() -> Iterator[None]:
    try:
        yield
    except Answer as answer:
        if answer.status != 409:
            raise


@contextmanager
def _said(what: str) -> Iterator[None]:
    """Convert unhandled answers to CloudUnreachable (unknown state) or CloudRefused."""
    import requests
    from google.auth import exceptions as auth

    try:
        yield
    except Answer as answer:
        if answer.status in ASK_LESS or answer.reason in ("rateLimitExceeded", "RATE_LIMIT_EXCEEDED"):
            raise CloudUnreachable(f"{what}: Google Cloud answers {answer}; it is asked again") from None
        advice = advice_on(str(answer)) or "`spotrl check --print-policy gcp` prints what is needed"
        raise CloudRefused(f"{what}: Google Cloud refused ({answer}); {advice}") from None
    except auth.DefaultCredentialsError:
        raise CloudRefused(
            "Google Cloud found no credentials; `gcloud auth application-default login` makes some, or "
            "GOOGLE_APPLICATION_CREDENTIALS names a key file"
        ) from None
    except auth.TransportError as error:
        raise CloudUnreachable(f"{what}: Google Cloud did not answer ({error}); it is asked again") from None
    except auth.GoogleAuthError as error:
        raise CloudRefused(f"{what}: Google Cloud does not take these credentials ({error}); log in anew") from None
    except requests.exceptions.RequestException as error:
        raise CloudUnreachable(f"{what}: Google Cloud did not answer ({error}); it is asked again") from None
