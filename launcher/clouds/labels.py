"""Names and labels in the alphabet of the clouds: lower case, digits and hyphens, at most 63 characters.

AWS and Google Cloud use the same name, so that a reader of either console recognises the owner.
"""

import hashlib
import re

PREFIX = "spotrl"


def slug(text: str, limit: int = 63) -> str:
    """Return `text` as a label's value. A too long text is cut and made unique by a digest."""
    words = re.sub(r"[^a-z0-9-]+", "-", text.lower()).strip("-") or "x"
    if len(words) <= limit:
        return words
    digest = hashlib.blake2b(text.encode(), digest_size=4).hexdigest()
    return f"{words[: limit - 9].rstrip('-')}-{digest}"


def run_name(run: str, limit: int = 63) -> str:
    """Return the name of a run's resources: group, network, identity."""
    return slug(f"{PREFIX}-{run}", limit)


def bucket_of(url: str) -> tuple[str, str]:
    """Return bucket and prefix of `s3://bucket/prefix`, the prefix without outer slashes."""
    bucket, _, prefix = url.partition("://")[2].partition("/")
    return bucket, prefix.strip("/")
