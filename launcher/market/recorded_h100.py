"""What the recorded H100 markets say of a kind of node before any evidence of its own. Pure.

The recording counts how many of 16 one-GPU spot nodes could be created at once, in 13 Google Cloud zones. A node of n
GPUs counts as available while n of them could be created: a stand-in, because a host of n free GPUs is more than n free
GPUs. A run is taken to hold as many nodes as 16 GPUs allow, six at most. The figures are of days 0 to 5, and
tests/benchmarks/calibration.py fits them again and tests them on days 5 to 9.

A region's share of time with capacity is taken to be halfway between the mean of all regions and its own share in
those days, because markets change within weeks: one region had .04 of the time, and .71 in other days.
"""

SOURCE = "probes of one-GPU H100 nodes in 13 Google Cloud zones, October 2025"

SIZES = (1, 2, 4, 8)
"""GPUs of a node, for the figures below."""

HAZARD_FACTORS = (1.00, 1.08, 1.12, 1.15)
"""Hazard of a node over that of a node with one GPU, by `SIZES`."""

SHARES = (0.64, 0.55, 0.49, 0.45)
"""Share of time with capacity for a node, by `SIZES`: mean of the zones. Nine AWS zones of V100 had .64 for one GPU
too."""

SHARES_IN = {
    "asia-south2": (1.00, 1.00, 1.00, 1.00),
    "asia-southeast1": (0.54, 0.53, 0.50, 0.50),
    "europe-west1": (0.71, 0.39, 0.24, 0.11),
    "europe-west3": (0.03, 0.01, 0.00, 0.00),
    "us-central1": (0.83, 0.71, 0.62, 0.55),
    "us-east4": (0.87, 0.79, 0.70, 0.63),
    "us-east5": (0.69, 0.48, 0.36, 0.27),
    "us-west1": (0.30, 0.28, 0.26, 0.25),
}
"""The same in each region that was recorded: mean of its zones."""


def _of_size(figures: tuple[float, ...], gpus: int) -> float:
    """Return the figure of the smallest size that is not below `gpus`, or of the largest."""
    return next((figure for size, figure in zip(SIZES, figures, strict=True) if size >= gpus), figures[-1])


def hazard_factor(gpus: int) -> float:
    """Return the hazard of a node with so many GPUs over that of a node with one."""
    return _of_size(HAZARD_FACTORS, gpus)


def usual_share(accelerator: str, gpus: int, cloud: str = "", region: str = "") -> tuple[float, str]:
    """Return the share of time with spot capacity for such a node, and where the figure is from.

    Only H100 nodes of Google Cloud have figures of their regions.
    """
    share = _of_size(SHARES, gpus)
    own = SHARES_IN.get(region) if (cloud, accelerator.upper()) == ("gcp", "H100") else None
    if own is None:
        return share, f"{SOURCE}: mean share of time with capacity for {gpus} GPU{'s' if gpus > 1 else ''}"
    return (share + _of_size(own, gpus)) / 2, f"{SOURCE}: halfway between all zones and {region}"
