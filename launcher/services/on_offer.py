"""Current offers: the price tables, updated by later prices from the clouds. Pure; the time is passed in.

tables + latest prices of the ledger -> an offer per product, at the newest price -> without old prices and old GPUs

An AWS zone is named as in the user's account, if a recorded price holds the name. Nodes are recorded under the
account's zone names, so the observations of a zone match the zone's prices. A zone without a known name is named by the
zone id.
"""

from collections.abc import Iterable
from dataclasses import replace

from launcher.market.instance_types import is_too_old
from launcher.market.offers import Offer, buyable, is_at_the_edge, key, without_expired
from launcher.market.prices import PricePoint, time_ms
from launcher.services.refresh_catalog import merged, offers_from


def on_offer(tables: Iterable[Offer], latest: Iterable[PricePoint], now_ms: int) -> tuple[Offer, ...]:
    """Return the usable offers of `tables`, each at the newer of its own price and its price in `latest`.

    Left out: places that do not exist on the cloud, GPUs too old for nodes, expired prices. `latest`: the latest price
    of each pool.
    """
    latest = sorted(latest, key=lambda point: point.observed_ms)
    listed = buyable(tables)
    listed_ms = {key(offer): time_ms(offer.observed_at) or 0 for offer in listed}
    newer = [
        offer
        for offer in offers_from(latest).offers
        if not is_at_the_edge(offer) and (time_ms(offer.observed_at) or 0) >= listed_ms.get(key(offer), 0)
    ]
    names = {(point.region, point.zone_id): point.zone for point in latest if point.zone_id and point.zone}
    offers = [offer for offer in merged(listed, newer) if not is_too_old(offer.accelerator)]
    return without_expired(
        (replace(offer, zone=names.get((offer.region, offer.zone_id), offer.zone)) for offer in offers), now_ms
    )
