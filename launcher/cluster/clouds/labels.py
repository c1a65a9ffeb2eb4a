"""Names and labels in the alphabet of the clouds: lower case, digits and hyphens, at most 63 characters.

One name serves AWS and Google Cloud alike, so that whoever sees it in a console knows whose it is.
"""

import hashlib
import re

PREFIX = "spotrl"


def slug(text: str, limit: int = 63) -> str:
    """`text` as a label's value; what does not fit is told apart by a digest."""
    words = re.sub(r"[^a-z0-9-]+", "-", text.lower()).strip("-") or "x"
    if len(words) <= limit:
        return words
    digest = hashlib.blake2b(text.encode(), digest_size=4).hexdigest()
    return f"{words[: limit - 9].rstrip('-')}-{digest}"


def run_name(run: str, limit: int = 63) -> str:
    """What is made for a run is called so: its group, network, identity."""
    return slug(f"{PREFIX}-{run}", limit)


def bucket_of(url: str) -> tuple[str, str]:
    """Bucket and prefix, without slashes around it, of `s3://bucket/prefix`."""
    bucket, _, prefix = url.partition("://")[2].partition("/")
    return bucket, prefix.strip("/")
