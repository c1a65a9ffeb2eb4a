"""Open a store. For an S3 bucket, ask for the region first, because S3 refuses a signature for another region.

A bucket may be in another region than the node, and in another region than the environment names. S3 tells every caller
a bucket's region, without credentials. `AWS_ENDPOINT_URL_S3` and `AWS_ENDPOINT_URL` name another server.
"""

import os
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit

from engine.storage.disk import AWAY

if TYPE_CHECKING:
    from obstore.store import ObjectStore, RetryConfig

TRIES, GAP_SECONDS, ANSWER_SECONDS = 3, 1.0, 5.0


def folder_of(url: str) -> Path | None:
    """Return the folder of a `file://` URL, whose blanks and umlauts are written %20 and %C3%BC. None: a bucket."""
    return Path(unquote(url.removeprefix("file://"))) if url.startswith("file://") else None


def open_store(url: str, retries: "RetryConfig | None" = None) -> "ObjectStore":
    """Return the store at an obstore URL, with this machine's own credentials. `retries`: by default obstore's.

    Raises OSError if S3 does not report the bucket's region. The failure may pass, so `when_there_is_room` waits.
    """
    from obstore.store import LocalStore, from_url  # import here only: the node's agent stays small

    folder, where = folder_of(url), urlsplit(url)
    if folder is not None:
        return LocalStore(folder, mkdir=True)
    region = region_of(where.netloc) if where.scheme == "s3" else None
    if region is None:
        return from_url(url, retry_config=retries)
    return from_url(url, region=region, retry_config=retries)


def region_of(bucket: str) -> str | None:
    """Return the region of an S3 bucket, or None if the server reports no region, like some servers that imitate S3.

    Raises OSError if no server answers.
    """
    endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL") or "https://s3.amazonaws.com"
    request = urllib.request.Request(f"{endpoint.rstrip('/')}/{bucket}", method="HEAD")
    trouble: OSError | None = None
    for attempt in range(TRIES):
        if attempt:
            time.sleep(GAP_SECONDS)
        try:
            with urllib.request.urlopen(request, timeout=ANSWER_SECONDS) as response:
                headers = response.headers
        except urllib.error.HTTPError as error:
            headers = error.headers  # a caller without access to the bucket gets the region too
        except OSError as error:
            trouble = error
            continue
        region = headers.get("x-amz-bucket-region")
        return None if region is None else str(region)
    raise OSError(AWAY, f"{endpoint} does not say in which region the bucket {bucket} is: {trouble}")
