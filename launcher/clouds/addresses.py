"""Address ranges in CIDR notation, as firewall rules of both clouds use."""

from ipaddress import IPv4Network, IPv6Network, ip_network


def covers(wide: str, narrow: str) -> bool:
    """Return whether all addresses of `narrow` are in `wide`."""
    match ip_network(wide, strict=False), ip_network(narrow, strict=False):
        case (IPv4Network() as outer, IPv4Network() as inner):
            return inner.subnet_of(outer)
        case (IPv6Network() as outer, IPv6Network() as inner):
            return inner.subnet_of(outer)
    return False
