"""Refusals that last until a user changes a setting on the cloud: their texts, and advice.

Causes are an organisation policy, an account without subnets, a SkyPilot without a login: a retry brings the same
answer.
The texts come from AWS, Google Cloud and SkyPilot 0.14.1 (`sky/provision/*/config.py`, `sky/clouds/gcp.py`).
"""

import re

CONSTRAINT = re.compile(r"Constraint [`'\"]?constraints/([\w.]+)")

POLICY_WORDS = ("Constraint constraints/", "conditionNotMet", "service control policy")

OF_CONSTRAINTS = {
    "compute.vmExternalIpAccess": "or name a network with `public_addresses: false` in the job (network.gcp)",
    "compute.trustedImageProjects": "or name an image of a trusted project in the job (`image: {gcp: projects/...}`)",
    "compute.requireOsLogin": "SkyPilot and spotrl log in by keys in a machine's metadata, which OS Login turns off",
    "compute.skipDefaultNetworkCreation": "or name a network that is there in the job (network.gcp)",
}
"""By organisation policy: a change to the job that avoids the policy, so that no administrator must make an
exception."""

ZONE_WORDS = ("No usable subnets matching availability zone",)
"""Texts of refusals that hold in one zone: a zone without a subnet tells nothing about the region's other zones."""

NETWORK_WORDS = (
    *ZONE_WORDS,
    "either does not exist or has no subnets",
    "No default VPC",
    "VPCIdNotSpecified",
    "No VPC with name",
    "Multiple VPCs with name",
    "No subnets with name",
    "No candidate subnets found",
    "The specified subnets are not usable",
    "All candidate subnets are private",
    "all candidate subnets are public",
    "VPC_NOT_FOUND",
    "SUBNET_NOT_FOUND",
)

LOGIN_WORDS = (
    "Missing `gcloud`",
    "Getting project ID or user identity failed",
    "Credentials are not set",
    "Application credentials are not set",
    "No GCP account is activated",
    "which is not enabled",
    "InvalidCloudCredentials",
    "invalid cloud credentials",
    "No cloud access",
    "NoCloudAccessError",
)

REFUSAL_WORDS = (*POLICY_WORDS, *NETWORK_WORDS, *LOGIN_WORDS)


def advice_on(reason: str) -> str:
    """Return advice for the user about a refusal; empty if the text is unknown."""
    if any(word in reason for word in POLICY_WORDS):
        return _on_policy(reason)
    if any(word in reason for word in NETWORK_WORDS):
        return (
            "The network that nodes need is not there, or has no subnet for them. Make it (AWS: `aws ec2 "
            "create-default-vpc`, or `aws ec2 create-default-subnet --availability-zone ZONE`), name a network in the "
            "job (`network:`), or leave the region out (resources.trainer.infra)"
        )
    if any(word in reason for word in LOGIN_WORDS):
        return (
            "SkyPilot is not logged in to that cloud where its API server runs: `gcloud auth login` there for Google "
            "Cloud, `aws configure` for AWS, then `spotrl check`"
        )
    return ""


def holds_in_its_zone_alone(reason: str) -> bool:
    """Return whether a refusal concerns one zone only, and not the region's other zones."""
    return any(word in reason for word in ZONE_WORDS)


def _on_policy(reason: str) -> str:
    found = CONSTRAINT.search(reason)
    if found is None:
        return "A policy of the organisation forbids it. Ask its administrator for an exception for this account"
    name = found[1].rstrip(".")
    own = OF_CONSTRAINTS.get(name)
    return (
        f"The organisation policy constraints/{name} forbids it. Ask its administrator for an exception for the project"
        f"{f'; {own}' if own else ''}"
    )
