"""Terminate this instance for good: delete the instance through its cloud, with the instance's own identity.

identity (metadata service) -> delete (the cloud's API, 3 tries) -> still running after a while: shut the system down

A shutdown alone may leave a stopped instance with a paid disk, so the shutdown comes last. The command is
`SPOTRL_SHUTDOWN`'s, or `sudo -n shutdown -h now`. `AWS_ENDPOINT_URL_EC2`, `AWS_ENDPOINT_URL` and
`SPOTRL_GCP_COMPUTE_ENDPOINT` name another API. If `cloud` is neither aws nor gcp, nothing is terminated. Standard
library only: the guard of the spend deadline uses this module. The only call to AWS is signed here (SigV4).
"""

import hashlib
import hmac
import http.client
import json
import os
import shlex
import subprocess
import time
import urllib.request
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from urllib.parse import urlencode, urlsplit

from engine.storage.metadata import GceMetadata, Imds

SHUTDOWN = "SPOTRL_SHUTDOWN"
TRIES = 3
ANSWER_SECONDS = 10.0
GAP_SECONDS = 2.0
STILL_HERE_SECONDS = 60.0
"""Seconds within which an instance is gone after its cloud accepted the deletion."""


def terminate_instance(
    cloud: str, report: Callable[[str], None], still_here_seconds: float = STILL_HERE_SECONDS
) -> None:
    """Terminate this instance. Returns only if the instance is still running afterwards."""
    if cloud not in ("aws", "gcp"):
        report(f"this instance is not ended: {cloud or 'no cloud'!r} is neither aws nor gcp")
        return
    delete = _delete_aws if cloud == "aws" else _delete_gcp
    for attempt in range(1, TRIES + 1):
        try:
            report(f"ending this instance: {delete()}")
            time.sleep(still_here_seconds)
            report(f"the cloud took the order {still_here_seconds:.0f} s ago and this instance is still here")
            break
        except (OSError, ValueError, KeyError, TypeError, http.client.HTTPException) as error:
            report(f"ending this instance, try {attempt} of {TRIES}: {_in_words(error)}")
            time.sleep(GAP_SECONDS)
    command = shlex.split(os.environ.get(SHUTDOWN, "sudo -n shutdown -h now"))
    report(f"shutting the system down: {' '.join(command)}")
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=ANSWER_SECONDS, check=False)
        report(f"{command[0]} ended with {done.returncode} {done.stderr.strip()}")
    except (OSError, subprocess.TimeoutExpired) as error:
        report(f"{command[0]}: {error}")


def _delete_aws() -> str:
    imds = Imds()
    where = json.loads(_needed(imds.get("dynamic/instance-identity/document"), "identity document"))
    role = _needed(imds.get("meta-data/iam/security-credentials/"), "role").split()[0]
    credentials = json.loads(_needed(imds.get(f"meta-data/iam/security-credentials/{role}"), "credentials"))
    region, instance = where["region"], where["instanceId"]
    endpoint = (
        os.environ.get("AWS_ENDPOINT_URL_EC2")
        or os.environ.get("AWS_ENDPOINT_URL")
        or f"https://ec2.{region}.amazonaws.com"
    )
    body = urlencode({"Action": "TerminateInstances", "InstanceId.1": instance, "Version": "2016-11-15"}).encode()
    headers = signed(endpoint, body, region, credentials, datetime.now(UTC))
    _send(urllib.request.Request(_root(endpoint), data=body, headers=headers, method="POST"))
    return f"EC2 terminates {instance} in {region}"


def _delete_gcp() -> str:
    metadata = GceMetadata()
    project, name = metadata.get("project/project-id"), metadata.get("instance/name")
    zone = metadata.get("instance/zone").rsplit("/", 1)[-1]
    token = json.loads(metadata.get("instance/service-accounts/default/token"))["access_token"]
    endpoint = os.environ.get("SPOTRL_GCP_COMPUTE_ENDPOINT") or "https://compute.googleapis.com"
    if "://" not in endpoint:
        endpoint = f"https://{endpoint}"
    url = f"{endpoint.rstrip('/')}/compute/v1/projects/{project}/zones/{zone}/instances/{name}"
    _send(urllib.request.Request(url, headers={"Authorization": f"Bearer {token}"}, method="DELETE"))
    return f"Compute Engine deletes {name} in {zone}"


def signed(endpoint: str, body: bytes, region: str, credentials: Mapping[str, str], at: datetime) -> dict[str, str]:
    """Return the headers of a POST to EC2's root, with AWS's signature version 4."""
    stamp, day = at.strftime("%Y%m%dT%H%M%SZ"), at.strftime("%Y%m%d")
    headers = {
        "content-type": "application/x-www-form-urlencoded; charset=utf-8",
        "host": urlsplit(endpoint).netloc,
        "x-amz-date": stamp,
        "x-amz-security-token": credentials["Token"],
    }
    names = ";".join(headers)
    lines = "".join(f"{name}:{value}\n" for name, value in headers.items())
    canonical = f"POST\n/\n\n{lines}\n{names}\n{hashlib.sha256(body).hexdigest()}"
    scope = f"{day}/{region}/ec2/aws4_request"
    to_sign = f"AWS4-HMAC-SHA256\n{stamp}\n{scope}\n{hashlib.sha256(canonical.encode()).hexdigest()}"
    key = f"AWS4{credentials['SecretAccessKey']}".encode()
    for part in scope.split("/"):
        key = hmac.digest(key, part.encode(), "sha256")
    signature = hmac.digest(key, to_sign.encode(), "sha256").hex()
    headers["authorization"] = (
        f"AWS4-HMAC-SHA256 Credential={credentials['AccessKeyId']}/{scope}, "
        f"SignedHeaders={names}, Signature={signature}"
    )
    return headers


def _root(endpoint: str) -> str:
    return f"{endpoint.rstrip('/')}/"


def _send(request: urllib.request.Request) -> None:
    with urllib.request.urlopen(request, timeout=ANSWER_SECONDS) as response:
        response.read()


def _needed(text: str | None, fact: str) -> str:
    if text is None:
        raise ValueError(f"the metadata service knows no {fact} of this instance")
    return text


def _in_words(error: Exception) -> str:
    if isinstance(error, urllib.error.HTTPError):
        return f"{error} {error.read(500).decode(errors='replace')}"
    return repr(error)
