"""The identity of a run's nodes on Google Cloud: a service account with a small role, narrowed by conditions.

A node's identity may terminate instances of its run and use its prefix of the buckets.
"""

import json
import time
from collections.abc import Mapping, Sequence
from typing import Any

from launcher.clouds.base import OWNER_LABEL, RUN_LABEL, CloudRefused, CloudUnreachable, NotSettled, refuse_foreign
from launcher.clouds.gce_calls import GoogleCalls, existing_is_fine
from launcher.clouds.gce_inventory import described
from launcher.clouds.gce_services import IAM, PROJECTS, Answer
from launcher.clouds.labels import bucket_of, run_name
from launcher.job.values import SLOTS_IN_NAMES

ROLE_ID = "spotrlNode"
ROLE_PERMISSIONS = (
    "compute.instances.delete",
    "compute.instances.get",
    "compute.instances.list",
    "compute.zoneOperations.get",  # SkyPilot's timer on the VM waits for the deletion
)
"""One role for all runs of a project: a deleted custom role keeps its name for weeks. Conditions narrow the role to
a run."""

NEW_ACCOUNT_SECONDS = 120.0
"""Time after which a new service account is known everywhere, according to Google."""


class NodeIdentity:
    """Makes, binds and deletes the service accounts of runs. Idempotent."""

    def __init__(self, calls: GoogleCalls) -> None:
        self._calls = calls
        self._bound_first: dict[str, float] = {}
        """By account: time of the first binding that failed because the account was unknown (monotonic seconds)."""

    def prepare(self, run: str, owner: str, buckets: Sequence[str], models: Sequence[str]) -> str:
        """Find or make the account, its role and its bindings. Returns the account's e-mail."""
        project, whose = self._calls.project, json.dumps({"run": run, "owner": owner})
        account = run_name(run, limit=30)
        email = f"{account}@{project}.iam.gserviceaccount.com"
        is_new = False
        with existing_is_fine():
            body = {"accountId": account, "serviceAccount": {"displayName": f"node of {run}", "description": whose}}
            self._calls.ask("POST", IAM, "/serviceAccounts", body)
            is_new = True
        if not is_new:
            self._refuse_foreign(email, run, owner)
        role = f"projects/{project}/roles/{ROLE_ID}"
        self.prepare_role()
        self.bind(email, node_conditions(run, role, buckets, models))
        return email

    def _refuse_foreign(self, email: str, run: str, owner: str) -> None:
        """Raise CloudRefused if the account of our name was not made by spotrl for this owner's run."""
        accounts = self._calls.list(IAM, "/serviceAccounts", key="accounts")
        account = next((account for account in accounts if account["email"] == email), None)
        if account is None:
            raise NotSettled(f"gcp has a service account {email} and does not list it yet; it is asked again")
        resource = described("identity", "", {**account, "name": email}, None)
        labels = {RUN_LABEL: resource.run, OWNER_LABEL: resource.owner}
        refuse_foreign(f"gcp service account {email}", run, owner, labels)

    def prepare_role(self) -> None:
        """Make the role of nodes if missing. An existing role is never changed.

        Raises CloudRefused with an administrator's command if the role is missing and may not be made here, was
        deleted, or has different permissions. spotrl does not ask for the right to change roles: with this right, the
        launcher could add any permission to the role and use the permission from a node.
        """
        project = self._calls.project
        of_project = f"{ROLE_ID} --project {project}"
        permissions = ",".join(ROLE_PERMISSIONS)
        try:
            role = self._calls.ask("GET", IAM, f"/roles/{ROLE_ID}")
        except Answer as answer:
            if answer.status != 404:
                raise
            self._make_role(f"gcloud iam roles create {of_project} --title 'spotrl node' --permissions {permissions}")
            return
        if role.get("deleted"):
            raise CloudRefused(
                f"the role {ROLE_ID} of project {project} was deleted; get it back: "
                f"gcloud iam roles undelete {of_project}"
            )
        allowed = set(role.get("includedPermissions", ()))
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
            with existing_is_fine():
                self._calls.ask("POST", IAM, "/roles", {"roleId": ROLE_ID, "role": about})
        except Answer as answer:
            if answer.status != 403:
                raise
            raise CloudRefused(
                f"the role {ROLE_ID} is not there, and these credentials may not make it; an administrator makes it "
                f"once for the project: {command}"
            ) from None

    def bind(self, email: str, conditions: Mapping[str, tuple[str, str]] | None) -> None:
        """Give an account exactly these roles (condition title -> role, expression); None removes all roles."""
        member = f"serviceAccount:{email}"
        for _ in range(3):
            options = {"options": {"requestedPolicyVersion": 3}}
            policy = self._calls.ask("POST", PROJECTS, ":getIamPolicy", options)
            before = policy.get("bindings", [])
            bindings = [binding for binding in before if member not in binding.get("members", ())]
            shared = [
                binding for binding in before if member in binding.get("members", ()) and len(binding["members"]) > 1
            ]
            bindings += [{**binding, "members": [m for m in binding["members"] if m != member]} for binding in shared]
            bindings += [
                {"role": role, "members": [member], "condition": {"title": title, "expression": expression}}
                for title, (role, expression) in (conditions or {}).items()
            ]
            if sorted(map(_canonical, bindings)) == sorted(map(_canonical, before)):
                return
            try:
                policy = {**policy, "version": 3, "bindings": bindings}
                self._calls.ask("POST", PROJECTS, ":setIamPolicy", {"policy": policy})
                return
            except Answer as answer:
                if answer.status == 400 and conditions and "does not exist" in answer.text and self._is_new(email):
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

    def remove(self, email: str) -> None:
        """Take away all roles of an account, then delete the account."""
        self.bind(email, None)
        self._calls.ask("DELETE", IAM, f"/serviceAccounts/{email}")


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


def _canonical(binding: Mapping[str, Any]) -> str:
    return json.dumps(binding, sort_keys=True)
