"""Which region an S3 bucket is in: the store's client must ask there, and it may be another one than the node's.

Anybody may ask S3 for it, without credentials. `AWS_ENDPOINT_URL_S3` and `AWS_ENDPOINT_URL` name another server.
"""

import os
import time
import urllib.error
import urllib.request
from urllib.parse import urlsplit

TRIES, GAP_SECONDS, ANSWER_SECONDS = 3, 1.0, 5.0

NAMED_BY = ("AWS_REGION", "AWS_DEFAULT_REGION")


def settle_region(store: str) -> None:
    """Name the bucket's region to every process that starts from here on, if nobody named one yet."""
    url = urlsplit(store)
    if url.scheme != "s3" or any(os.environ.get(name) for name in NAMED_BY):
        return
    region = region_of(url.netloc)
    if region is not None:
        os.environ["AWS_REGION"] = region


def region_of(bucket: str) -> str | None:
    """None when S3 does not say."""
    endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL") or "https://s3.amazonaws.com"
    request = urllib.request.Request(f"{endpoint.rstrip('/')}/{bucket}", method="HEAD")
    for attempt in range(TRIES):
        if attempt:
            time.sleep(GAP_SECONDS)
        try:
            with urllib.request.urlopen(request, timeout=ANSWER_SECONDS) as response:
                headers = response.headers
        except urllib.error.HTTPError as error:
            headers = error.headers  # who may not look at the bucket is told its region all the same
        except OSError as error:
            print(f"where the bucket {bucket} is: {error}", flush=True)
            continue
        if region := headers.get("x-amz-bucket-region"):
            return str(region)
    return None
