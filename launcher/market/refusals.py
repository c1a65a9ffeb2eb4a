"""Refusals of clouds in known words, and advice for the user.

Denials last until a user changes a setting on the cloud: an organisation policy, an account without subnets, a SkyPilot
without a login. A retry brings the same answer. Remedies are for accounts that are new or restricted, and for places
without a type: the run looks elsewhere, and asks again later.
The texts come from AWS, Google Cloud and SkyPilot 0.14.1 (`sky/provision/*/config.py`, `sky/clouds/gcp.py`).
"""

import re
from dataclasses import dataclass

CONSTRAINT = re.compile(r"[Cc]onstraint [`'\"]?constraints/([\w.]+)")

POLICY_WORDS = ("onstraint constraints/", "conditionNotMet", "service control policy")

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

UNSENT = "SkyPilot does not send the launch"
"""Beginning of the evidence of a node whose zone, type or image SkyPilot's own catalog does not know."""

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

EXPIRED_CODES = (
    "ExpiredToken",
    "ExpiredTokenException",
    "RequestExpired",
    "TokenRefreshRequired",
    "InvalidToken",
    "InvalidClientTokenId",
    "UnrecognizedClientException",
    "InvalidAccessKeyId",
    "SignatureDoesNotMatch",
    "RequestTimeTooSkewed",
)
"""Error codes of AWS for keys that have expired or were replaced, or for a clock that is wrong by more than minutes."""

KEYS_NOT_VALID = "not able to validate the provided access credentials"
"""EC2's words, with the code AuthFailure, for keys that were deleted or turned off, and in a region that is off."""

ALWAYS_ON = re.compile(
    r"\b(?:us-(?:east|west)-[12]|ca-central-1|sa-east-1|eu-(?:central-1|north-1|west-[123])|"
    r"ap-(?:south-1|southeast-[12]|northeast-[123]))(?![0-9-])"
)
"""Regions of AWS that no account can turn off (AWS Account Management Reference Guide, Enable or disable Regions)."""

EXPIRED_WORDS = (
    "ExpiredToken",
    "RequestExpired",
    "TokenRefreshRequired",
    "InvalidClientTokenId",
    "UnrecognizedClientException",
    "InvalidAccessKeyId",
    "SignatureDoesNotMatch",
    "RequestTimeTooSkewed",
    "TokenRetrievalError",
    "CredentialRetrievalError",
    "UnauthorizedSSOToken",
    "SSOTokenLoadError",
    "LoginRefreshRequired",
    "NoCredentialsError",
    "Unable to locate credentials",
    "security token included in the request is",
    "oken has expired",
    "SSO session associated with this profile has expired",
    "RefreshError",
    "ReauthFail",
    "Reauthentication",
    "eauth related error",
    "invalid_grant",
    "invalid_rapt",
    "ACCESS_TOKEN_EXPIRED",
    "invalid authentication credential",
    "Getting project ID or user identity failed",
    "redentials are not set",
    "No GCP account is activated",
    "InvalidCloudCredentials",
    "nvalid cloud credentials",
    "CloudUserIdentityError",
)
"""Texts in the errors and logs of SkyPilot and of the clouds' clients for a login that has expired or is missing."""

GOOGLE_WORDS = ("gcp", "GCP", "oogle", "gcloud", "invalid_grant", "Reauth", "reauth", "rapt")

LOGIN_WORDS = (
    "Missing `gcloud`",
    "which is not enabled",
    "No cloud access",
    "NoCloudAccessError",
)

REFUSAL_WORDS = (*POLICY_WORDS, *NETWORK_WORDS, *LOGIN_WORDS)


@dataclass(frozen=True, kw_only=True, slots=True)
class Remedy:
    """The words of a refusal (a regular expression), and the user's remedy in a sentence."""

    words: re.Pattern[str]
    advice: str


def _remedy(words: str, advice: str) -> Remedy:
    return Remedy(words=re.compile(words, re.IGNORECASE), advice=advice)


REMEDIES = (
    _remedy(
        r"PendingVerification|account is (?:currently )?being (?:verified|validated)|validat\w+ .{0,40}in this region",
        "AWS still verifies this account for that region. That mostly takes minutes, at most four hours, and the run "
        "asks again by itself. If AWS has sent an e-mail that asks for something, answer it",
    ),
    _remedy(
        r"not eligible for (?:the )?free tier|free plan|FreeTierRestriction",
        "The account is on AWS's free plan, which has no GPUs. Upgrade it: AWS console, Billing and Cost Management, "
        "Upgrade plan. The run asks again by itself",
    ),
    _remedy(
        r"billing[ _]?(?:has been |is |was )?(?:disabled|not[ _]?enabled)|BILLING_DISABLED|requires billing|"
        r"billing (?:account|to be enabled)|account is currently blocked|\(Blocked\)|AccountDisabled|"
        r"UserProjectAccountProblem",
        "The account's billing is off. Google Cloud: Billing, link the project to an open billing account. AWS: "
        "Billing and Cost Management, Payments, or AWS support. The run asks again by itself",
    ),
    _remedy(
        r"accessNotConfigured|SERVICE_DISABLED|API has not been used in project|API .{0,80}is not enabled|"
        r"or it is disabled\. Enable it",
        "An API of Google Cloud is off in this project: `gcloud services enable compute.googleapis.com "
        "iam.googleapis.com cloudresourcemanager.googleapis.com`. The run asks again by itself",
    ),
    _remedy(
        r"ServiceLinkedRoleCreationNotPermitted|service-linked role",
        "The account has never used spot, and these credentials may not prepare it. An administrator does so once: "
        "`aws iam create-service-linked-role --aws-service-name spot.amazonaws.com`",
    ),
    _remedy(
        r"KMSKeyNotAccessible|InvalidKMSKey|KmsKey\w*(?:Invalid|NotFound|Disabled)|Client\.InternalError|"
        r"Client\.InvalidKMSKey|KMSAccessDenied|cloudkms|CloudKMS|KMS key",
        "The instance probably cannot use the key of its disk. If disks are encrypted by default with a key of your "
        "own, let the key's policy allow the account's role AWSServiceRoleForEC2Spot (AWS: kms:CreateGrant) or "
        "Compute Engine's service agent (Google Cloud: Cloud KMS CryptoKey Encrypter/Decrypter), or make the cloud's "
        "own key the default",
    ),
    _remedy(
        r"VolumeLimitExceeded|MaxIOPSLimitExceeded|(?:SSD|DISKS|HDD)_TOTAL_(?:GB|STORAGE)|HYPERDISK\w*|"
        r"maximum (?:number of gigabytes|volume storage)",
        "The account's quota of disk space does not allow it. Ask for more (AWS, Service Quotas, Amazon EBS, storage "
        "for gp3; Google Cloud, IAM & Admin, Quotas, SSD_TOTAL_GB), or name smaller disks in the job "
        "(resources.disk_gb)",
    ),
    _remedy(
        r"AddressLimitExceeded|IN_USE_ADDRESSES|STATIC_ADDRESSES",
        "The account's quota of addresses does not allow it. Ask for more (Google Cloud, IAM & Admin, Quotas, "
        "IN_USE_ADDRESSES; AWS, Service Quotas, Amazon EC2), or name a network with `public_addresses: false` in the "
        "job",
    ),
    _remedy(
        r"\(Unsupported\)|not supported in your requested availability zone|"
        r"machine type with name .{0,80}does not exist|"
        r"(?:machine|accelerator)Types?\b.{0,120}(?:not found|does not exist|is not available)|"
        r"instance type .{0,60}(?:is not supported|does not exist)",
        "That zone does not have the instance type, and the run asks other places. `spotrl catalog refresh` reads "
        "again where types are",
    ),
)
"""Known refusals of accounts and places, the more telling words first."""


def remedy_for(text: str) -> Remedy | None:
    """Return the remedy for a refusal that another place, or a later request, may not meet. None: unknown words."""
    return next((remedy for remedy in REMEDIES if remedy.words.search(text)), None)


def is_login_needed(text: str) -> bool:
    """Return whether a text says that the login at a cloud has expired or is missing."""
    return any(word in text for word in EXPIRED_WORDS) or are_keys_refused(text)


def are_keys_refused(text: str) -> bool:
    """Return whether EC2 refuses the keys in a region that is on in every account."""
    return KEYS_NOT_VALID in text and ALWAYS_ON.search(text) is not None


def log_in_again(cloud: str) -> str:
    """Return the command that logs in anew at a cloud."""
    if cloud == "gcp":
        return "log in again: `gcloud auth login --update-adc`"
    return "log in again: `aws sso login`, or `aws configure` for keys . If they are new: set this machine's clock"


def cloud_in(text: str) -> str:
    """Return the cloud whose login a text is about."""
    return "gcp" if any(word in text for word in GOOGLE_WORDS) else "aws"


def advice_on(reason: str) -> str:
    """Return advice for the user about a refusal; empty if the text is unknown."""
    if remedy := remedy_for(reason):
        return remedy.advice
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
    return any(word in reason for word in (*ZONE_WORDS, UNSENT))


def _on_policy(reason: str) -> str:
    match = CONSTRAINT.search(reason)
    if match is None:
        return "A policy of the organisation forbids it. Ask its administrator for an exception for this account"
    name = match[1].rstrip(".")
    own = OF_CONSTRAINTS.get(name)
    return (
        f"The organisation policy constraints/{name} forbids it. Ask its administrator for an exception for the project"
        f"{f'; {own}' if own else ''}"
    )
