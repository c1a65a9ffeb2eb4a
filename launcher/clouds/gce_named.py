"""Check resources on Google Cloud named in a job: a service account, a network with its subnet and rules.

Only the network's own allow rules are read. Deny rules, and firewall policies of the organisation, are not read.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from launcher.clouds.addresses import covers
from launcher.clouds.base import Finding, Look
from launcher.clouds.gce_services import COMPUTE, IAM_OF_ANY, Answer, compute_of
from launcher.job.company import Named

ALL_PORTS = range(1, 65536)
SSH_PORT = range(22, 23)

Ask = Callable[..., dict[str, Any]]


class GoogleNames:
    """Checks of named resources by calls of one project.

    `ask` is `GceApi._ask`: method, service, path; raises Answer.
    """

    def __init__(self, ask: Ask) -> None:
        self._ask = ask

    def look_at_account(self, email: str) -> Finding:
        """Check for a service account in enabled state."""
        try:
            account = self._ask("GET", IAM_OF_ANY, f"/serviceAccounts/{email}")
        except Answer as answer:
            return _not_found(answer, f"service account {email}", "identity.gcp")
        if account.get("disabled"):
            text = f"service account {email} is disabled; `gcloud iam service-accounts enable {email}`"
            return Finding(look=Look.WRONG, text=text)
        return Finding(look=Look.OK, text=f"service account {email}")

    def look_at_network(self, region: str, named: Named, ssh_from: str) -> list[Finding]:
        """Check the network, its subnet and its rules. `ssh_from`: CIDR; empty if SSH comes from an unknown address."""
        project, _, network = named.network.rpartition("/")
        compute = compute_of(project) if project else COMPUTE
        try:
            self._ask("GET", compute, f"/global/networks/{network}")
            subnets = list(self._subnets(compute, region, network, named.subnets))
            rules = [rule for rule in self._pages(compute, "/global/firewalls") if _last(rule["network"]) == network]
        except Answer as answer:
            return [_not_found(answer, f"network {named.network}, its subnets or its rules", "network.gcp")]
        if not subnets:
            no_subnet = f"no subnet {named.subnets[0]}" if named.subnets else "no subnet"
            text = f"network {named.network} has {no_subnet} in {region}; add it, or correct network.gcp.subnets"
            return [Finding(look=Look.WRONG, text=text)]
        missing = missing_rules(rules, named, ssh_from, subnets[0]["ipCidrRange"])
        findings = [Finding(look=Look.WRONG, text=f"{text}; add it") for text in missing]
        if not named.public_addresses and not subnets[0].get("privateIpGoogleAccess"):
            text = (
                f"subnet {subnets[0]['name']} ({region}) has no Private Google Access; nodes without public addresses "
                "need it, or Cloud NAT, to reach the bucket and to end themselves"
            )
            findings.append(Finding(look=Look.UNSURE, text=text))
        if not findings:
            text = f"network {named.network}, subnet {subnets[0]['name']}, {len(rules)} firewall rules"
            findings.append(Finding(look=Look.OK, text=text))
        return findings

    def _subnets(
        self, compute: tuple[str, str, str], region: str, network: str, names: Sequence[str]
    ) -> Iterator[dict[str, Any]]:
        for subnet in self._pages(compute, f"/regions/{region}/subnetworks"):
            if _last(subnet["network"]) == network and (not names or subnet["name"] in names):
                yield subnet

    def _pages(self, compute: tuple[str, str, str], path: str) -> Iterator[dict[str, Any]]:
        token = ""
        while True:
            page = self._ask("GET", compute, path, query={"pageToken": token} if token else {})
            yield from page.get("items", ())
            token = page.get("nextPageToken", "")
            if not token:
                return


def missing_rules(rules: Iterable[Mapping[str, Any]], named: Named, ssh_from: str, subnet: str) -> list[str]:
    """Return a network's missing rules, as text: all traffic among the subnet's nodes, and SSH from `ssh_from`."""
    ours = [rule for rule in rules if _is_for_nodes(rule, named.identity)]
    missing = []
    if not any(_from_nodes(rule, named.identity, subnet) for rule in ours if _allows(rule, ALL_PORTS)):
        missing.append(f"network {named.network} lacks an ingress rule: all TCP ports from {subnet}, for all instances")
    if not any(_allows_source(rule, ssh_from) for rule in ours if _allows(rule, SSH_PORT)):
        source = ssh_from or "where ssh_proxy, or this machine, connects from"
        missing.append(f"network {named.network} lacks an ingress rule: tcp 22 (SSH) from {source}, for all instances")
    return missing


def _is_for_nodes(rule: Mapping[str, Any], identity: str) -> bool:
    """Return whether a rule applies to nodes.

    A rule for network tags does not: nodes have no tags of an administrator.
    """
    accounts = rule.get("targetServiceAccounts")
    return (
        rule.get("direction", "INGRESS") == "INGRESS"
        and not rule.get("disabled")
        and not rule.get("targetTags")
        and (not accounts or identity in accounts)
    )


def _allows(rule: Mapping[str, Any], ports: range) -> bool:
    """Return whether a rule allows TCP on all of the ports."""
    return any(
        entry["IPProtocol"] == "all" or (entry["IPProtocol"] in ("tcp", "6") and _has_ports(entry.get("ports"), ports))
        for entry in rule.get("allowed", ())
    )


def _has_ports(named: Sequence[str] | None, ports: range) -> bool:
    """Return whether a single range (`22`, `0-65535`) covers all of `ports`. No ranges: all ports."""
    if not named:
        return True
    ends = (text.partition("-") for text in named)
    return any(int(low) <= ports[0] and ports[-1] <= int(high or low) for low, _, high in ends)


def _from_nodes(rule: Mapping[str, Any], identity: str, subnet: str) -> bool:
    accounts = rule.get("sourceServiceAccounts", ())
    return (bool(identity) and identity in accounts) or any(
        covers(source, subnet) for source in rule.get("sourceRanges", ())
    )


def _allows_source(rule: Mapping[str, Any], ssh_from: str) -> bool:
    if ssh_from:
        return any(covers(source, ssh_from) for source in rule.get("sourceRanges", ()))
    return True


def _not_found(answer: Answer, resource: str, field: str) -> Finding:
    """Return the finding for a missing or invisible resource. Raises every other answer."""
    if answer.status == 404:
        return Finding(look=Look.WRONG, text=f"gcp has no {resource}; correct {field}")
    if answer.status == 403:
        return Finding(look=Look.UNSURE, text=f"{resource} cannot be seen with these credentials ({answer.text})")
    raise answer


def _last(link: str) -> str:
    return link.rpartition("/")[2]
