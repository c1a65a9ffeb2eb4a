"""The network of a run on Google Cloud: `spotrl-RUN`, with a subnet in each used region and two firewall rules.

Everything inside the network is a node of the run, so the rules need no tags.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from launcher.clouds.base import RegionSetup, refuse_anothers
from launcher.clouds.gce_calls import GoogleCalls, errors_named, existing_is_fine
from launcher.clouds.gce_inventory import described
from launcher.clouds.gce_services import COMPUTE
from launcher.clouds.labels import run_name

INSIDE = "10.128.0.0/9"
"""Address range of the run networks' subnets, reachable only from inside the same network."""

SUBNETS = 128


class RunNetwork:
    """Makes and checks the networks of runs. Idempotent."""

    def __init__(self, calls: GoogleCalls) -> None:
        self._calls = calls

    def prepare(self, region: str, run: str, owner: str, ssh_from: str) -> None:
        name, whose = run_name(run), json.dumps({"run": run, "owner": owner})
        with errors_named(f"gcp compute network {name}"):
            network = self._calls.made(
                "/global/networks", name, {"autoCreateSubnetworks": False, "description": whose}, global_wait=True
            )
            refuse_anothers(f"gcp network {name}", run, owner, described("network", "", network, None).owner)
            self._prepare_subnet(region, name, network["selfLink"], whose)
            self._prepare_firewall(f"{name}-inside", network["selfLink"], whose, INSIDE, {"IPProtocol": "all"})
            ssh = {"IPProtocol": "tcp", "ports": ["22"]}
            self._prepare_firewall(f"{name}-ssh", network["selfLink"], whose, ssh_from, ssh)

    def missing_rules(self, setup: RegionSetup) -> Sequence[str]:
        """Return the missing rules of the run's own network, as text."""
        missing = []
        needed_rules = {
            f"{setup.group}-inside": f"all traffic from {INSIDE}",
            f"{setup.group}-ssh": f"tcp 22 (SSH) from {setup.ssh_from}",
        }
        with errors_named("gcp compute firewalls.list"):
            rules = {rule["name"]: rule for rule in self._calls.list(COMPUTE, "/global/firewalls")}
        for name, words in needed_rules.items():
            rule = rules.get(name)
            if rule is None or rule.get("disabled"):
                missing.append(f"network {setup.network} lacks the firewall rule {name}: {words}")
            elif name.endswith("-ssh") and rule.get("sourceRanges") != [setup.ssh_from]:
                missing.append(
                    f"firewall rule {name} lets SSH in from {rule.get('sourceRanges')}, not {setup.ssh_from}"
                )
        return missing

    def _prepare_subnet(self, region: str, name: str, network: str, whose: str) -> None:
        path = f"/regions/{region}/subnetworks"
        if self._calls.find(f"{path}/{name}") is not None:
            return
        used_cidrs = {
            subnet.get("ipCidrRange")
            for subnet in self._calls.everywhere("subnetworks")
            if subnet.get("network", "").rpartition("/")[2] == name
        }
        for number in range(SUBNETS):
            cidr = f"10.{128 + number}.0.0/20"
            if cidr in used_cidrs:
                continue
            body = {"name": name, "network": network, "ipCidrRange": cidr, "description": whose}
            with existing_is_fine():
                self._calls.finish(self._calls.ask("POST", COMPUTE, path, body))
            return

    def _prepare_firewall(self, name: str, network: str, whose: str, source: str, allowed: Mapping[str, Any]) -> None:
        rule = self._calls.find(f"/global/firewalls/{name}")
        if rule is not None and rule.get("sourceRanges") == [source] and not rule.get("disabled"):
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
        if rule is None:
            with existing_is_fine():
                self._calls.finish(self._calls.ask("POST", COMPUTE, "/global/firewalls", body))
        else:
            self._calls.finish(self._calls.ask("PATCH", COMPUTE, f"/global/firewalls/{name}", body))
