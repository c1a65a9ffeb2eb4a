"""Places and instance types that SkyPilot's own catalog knows. SkyPilot launches nothing else.

Read from SkyPilot's files, without SkyPilot. SkyPilot fetches the files when it is first used and renews them every few
hours. Files that are missing or old prove nothing: then every offer stays, and a launch that SkyPilot does not take is
denied in its zone.
"""

import csv
import os
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from launcher.market.offers import Offer

FRESH_MS = 7 * 24 * 3_600_000
"""Age of a file, in ms, up to which a place that it lacks is left out. Assumed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SkyCatalog:
    """By cloud, region and instance type: the zones with the type. A cloud without a file is missing."""

    clouds: frozenset[str] = frozenset()
    zones: Mapping[tuple[str, str, str], frozenset[str]] = field(default_factory=dict)

    def lacks(self, offer: Offer) -> bool:
        """Return whether SkyPilot would not launch the offer."""
        if offer.cloud not in self.clouds:
            return False
        zones = self.zones.get((offer.cloud, offer.region, offer.instance_type))
        if zones is None:
            return True
        # On AWS the file has zone ids, because zone names differ between accounts.
        zone = offer.zone_id if offer.cloud == "aws" else offer.zone
        return bool(zone and zones) and zone not in zones


def sky_folder(environ: Mapping[str, str] = os.environ) -> Path:
    """Return the folder of SkyPilot's catalogs."""
    return Path(environ.get("SKY_RUNTIME_DIR") or "~").expanduser() / ".sky" / "catalogs"


def read_sky_catalog(folder: Path, clouds: Iterable[str], now_ms: int) -> SkyCatalog:
    """Read the files of the newest layout. A file that is missing, old or not as expected is left out."""
    layouts = sorted(folder.glob("v*"), key=lambda path: (len(path.name), path.name))
    readable: set[str] = set()
    zones: defaultdict[tuple[str, str, str], set[str]] = defaultdict(set)
    for cloud in clouds if layouts else ():
        file = layouts[-1] / cloud / "vms.csv"
        try:
            if now_ms - file.stat().st_mtime * 1000 > FRESH_MS:
                continue
            with file.open(newline="") as text:
                for row in csv.DictReader(text):
                    if instance_type := row["InstanceType"]:
                        zones[cloud, row["Region"], instance_type].update(filter(None, [row["AvailabilityZone"]]))
                        readable.add(cloud)
        except (OSError, KeyError, TypeError, UnicodeDecodeError, csv.Error):
            readable.discard(cloud)
    return SkyCatalog(
        clouds=frozenset(readable), zones={pool: frozenset(zone_names) for pool, zone_names in zones.items()}
    )
