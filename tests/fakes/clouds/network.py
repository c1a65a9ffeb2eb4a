"""The fake internet: one router, which is the world's own network namespace.

Each host has its own link, so all its traffic passes the router and its rules: deny incoming by default, allow by
security groups and firewalls, no route between private networks, translate public addresses. The whole rule set is
written again at each change and loaded atomically, so a removed rule is gone at once. (Existing connections stay, as on
real clouds.)
"""

import subprocess
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from ipaddress import IPv4Address, IPv4Network

from tests.fakes.clouds import addresses

NEWLINE = "\n"
ALL_PUBLIC = ", ".join(str(one) for one in addresses.PUBLIC)


@dataclass(frozen=True, kw_only=True, slots=True)
class Allow:
    """One rule for incoming traffic."""

    protocol: str
    """tcp, udp, icmp or all."""
    ports: tuple[int, int] | None
    """Ports; None means all."""
    ranges: tuple[str, ...] = ()
    members: tuple[str, ...] = ()
    """Private addresses of the instances of a group or tag, which are allowed only by their private addresses."""
    deny: bool = False

    def text(self, sources: Iterable[str]) -> str:
        if not (wanted := sorted(set(sources))):
            return ""
        parts = [f"ip saddr {{ {', '.join(wanted)} }}"]
        match self.protocol, self.ports:
            case (("tcp" | "udp"), (low, high)):
                parts.append(f"{self.protocol} dport {low}-{high}" if low < high else f"{self.protocol} dport {low}")
            case "all", _:
                pass
            case protocol, _:
                parts.append(f"ip protocol {protocol}")
        return " ".join([*parts, "drop" if self.deny else "accept"])


@dataclass(frozen=True, kw_only=True, slots=True)
class Port:
    """The connection of a host to the network."""

    link: str
    network: str
    """Hosts of one network reach each other by their private addresses."""
    private: str
    public: str
    rules: tuple[Allow, ...] = ()


@dataclass
class Router:
    """Owns the rule set of the namespace that it runs in."""

    loaded: str = ""
    client: str = addresses.CLIENT
    """Address of this computer, where controllers run."""
    ports: dict[str, Port] = field(default_factory=dict)
    apart: set[tuple[str, str]] = field(default_factory=set)
    """Pairs of addresses between which no packet passes, not even of an open connection."""

    def start(self) -> None:
        command(
            f"""
            ip link set lo up
            ip link add uplink type bridge
            ip link set uplink arp off up
            ip address add {self.client}/32 dev uplink
            ip address add {addresses.API}/32 dev uplink
            sysctl -qw net.ipv4.ip_forward=1 net.ipv4.conf.all.rp_filter=0 net.ipv4.conf.default.rp_filter=0
            """
        )
        for public in addresses.PUBLIC:
            command(f"ip route add {public} dev uplink src {self.client}")
        self.apply({})

    def plug(self, port: Port, pid: int) -> None:
        """Link a host, whose network namespace is that of `pid`, to the router."""
        command(
            f"""
            ip link add {port.link} type veth peer name eth0 netns {pid}
            ip address add {addresses.GATEWAY}/32 dev {port.link}
            ip link set {port.link} up
            ip route add {port.private}/32 dev {port.link} src {self.client}
            nsenter --target {pid} --net sh -ec '\
              ip link set lo up; ip address add {addresses.METADATA}/32 dev lo; \
              ip address add {port.private}/32 dev eth0; ip link set eth0 up; \
              ip route add {addresses.GATEWAY} dev eth0; \
              ip route add default via {addresses.GATEWAY} src {port.private}'
            """
        )

    def move(self, client: str, ports: Iterable[Port]) -> None:
        """Give this computer another address. Connections from the old one stay open and get no answer."""
        routes = [f"{public} dev uplink" for public in addresses.PUBLIC]
        routes += [f"{port.private}/32 dev {port.link}" for port in ports]
        command(
            "\n".join(
                [
                    f"ip address add {client}/32 dev uplink",
                    *(f"ip route replace {route} src {client}" for route in routes),
                    f"ip address delete {self.client}/32 dev uplink",
                ]
            )
        )
        self.client = client

    def cut(self, link: str) -> None:
        """Stop every packet of this host: a preempted instance does not close its connections."""
        subprocess.run(["ip", "link", "set", link, "down"], check=False, capture_output=True)

    def unplug(self, link: str) -> None:
        subprocess.run(["ip", "link", "delete", link], check=False, capture_output=True)

    def apply(self, ports: Mapping[str, Port]) -> None:
        text = rules(ports, self.client, self.apart)
        if text != self.loaded:
            done = subprocess.run(["nft", "-f", "-"], input=text, capture_output=True, text=True)
            if done.returncode:
                raise RuntimeError(f"nft refused the rules: {done.stderr}\n{text}")
            self.loaded = text


def rules(
    ports: Mapping[str, Port], client: str = addresses.CLIENT, apart: Collection[tuple[str, str]] = frozenset()
) -> str:
    """Return the whole rule set as text. `apart`: pairs of addresses between which no packet passes.

    Each host has two chains: one for its own network with private source addresses, and one for its public address with
    public source addresses (which are translated after these rules).
    """
    hosts = sorted(ports.values(), key=lambda port: port.private)
    networks: defaultdict[str, list[str]] = defaultdict(list)
    for host in hosts:
        networks[host.network].append(host.private)
    public = _elements([f"{host.public} : {host.private}" for host in hosts if host.public])
    egress = _elements([f"{host.private} : {host.public}" for host in hosts if host.public])
    seen_as = {client: client} | {host.private: host.public for host in hosts if host.public}

    def outside(rule: Allow) -> list[str]:
        ranges = [IPv4Network(one, strict=False) for one in rule.ranges]
        return [sender for sender, seen in seen_as.items() if any(IPv4Address(seen) in one for one in ranges)]

    chains = []
    for host in hosts:
        inner = [rule.text(rule.ranges + rule.members) for rule in host.rules]
        outer = [rule.text(outside(rule)) for rule in host.rules]
        for name, lines in ((host.link, inner), (f"{host.link}_public", outer)):
            chains += [f"  chain {name} {{", *(f"    {line}" for line in lines if line), "  }"]
    public_doors = _elements([f"{host.private} : jump {host.link}_public" for host in hosts])
    neighbours = NEWLINE.join(
        f"    ip saddr {{ {', '.join(members)} }} ip daddr {{ {', '.join(members)} }} ip daddr vmap @doors"
        for members in networks.values()
    )
    drops = NEWLINE.join(
        f"    ip saddr {sender} ip daddr {receiver} drop"
        for pair in sorted(apart)
        for sender, receiver in (pair, pair[::-1])
    )
    return f"""\
table ip world
delete table ip world
table ip world {{
  map public {{ type ipv4_addr : ipv4_addr; {public} }}
  map egress {{ type ipv4_addr : ipv4_addr; {egress} }}
  set private {{ type ipv4_addr; {_elements([host.private for host in hosts])} }}
  map doors {{ type ipv4_addr : verdict; {_elements([f"{host.private} : jump {host.link}" for host in hosts])} }}
  map public_doors {{ type ipv4_addr : verdict; {public_doors} }}
{NEWLINE.join(chains)}
  set known {{ type ipv4_addr; {_elements([host.public for host in hosts if host.public])} }}
  # Packets to an unused address are not tracked, because a later try may reach a new host.
  chain raw {{
    type filter hook prerouting priority raw;
    ip daddr {{ {ALL_PUBLIC} }} ip daddr != @known notrack
  }}
  chain raw_ours {{
    type filter hook output priority raw;
    ip daddr {{ {ALL_PUBLIC} }} ip daddr != @known notrack
  }}
  chain before {{
    type nat hook prerouting priority dstnat;
    dnat to ip daddr map @public
  }}
  chain before_ours {{
    type nat hook output priority -100;
    dnat to ip daddr map @public
  }}
  chain after {{
    type nat hook postrouting priority srcnat;
    ct status dnat snat to ip saddr map @egress
  }}
  chain forward {{
    type filter hook forward priority filter; policy drop;
{drops}
    ct state established,related accept
    ct status dnat ip daddr vmap @public_doors
    ct status dnat drop
{neighbours}
  }}
  chain input {{
    type filter hook input priority filter; policy drop;
{drops}
    ct state established,related accept
    iifname "lo" accept
    ip daddr {addresses.API} accept
    ip protocol icmp accept
  }}
  chain output {{
    type filter hook output priority filter; policy accept;
{drops}
    ct state established,related accept
    ct status dnat ip daddr vmap @public_doors
    ip saddr {addresses.API} accept
    ip daddr @private drop
  }}
}}
"""


def _elements(values: Sequence[str]) -> str:
    return f"elements = {{ {', '.join(values)} }}" if values else ""


def command(script: str) -> None:
    done = subprocess.run(["sh", "-e", "-c", script], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{script.strip()}\n{done.stderr}{done.stdout}")
