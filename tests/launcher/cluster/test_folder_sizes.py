"""The bytes in folders of buckets are counted in a bounded time, and a bucket in trouble is no error."""

import threading
from functools import partial

import pytest

from launcher.storage.folder_sizes import FolderSize, count_folders
from launcher.storage.stores import StoreDenied, StoreError

count = partial(count_folders, region_of=lambda url: "us-west-2")


def size_of(**facts) -> FolderSize:
    found = {"url": "s3://runs/digits", "bytes": None, "is_whole": False, "region": "", "problem": ""}
    return FolderSize(**found | facts)


def test_the_sizes_of_all_pages_are_added():
    pages = {"s3://runs/digits": [[1, 2], [], [40]], "gs://runs/digits": []}
    assert count([*pages], pages_of=lambda url: iter(pages[url])) == [
        size_of(bytes=43, is_whole=True, region="us-west-2"),
        size_of(url="gs://runs/digits", bytes=0, is_whole=True, region="us-west-2"),
    ]


@pytest.mark.parametrize("error", [StoreDenied("no permission\nmore words"), OSError("no permission")])
def test_a_folder_that_cannot_be_listed_is_unknown(error):
    def pages_of(url):
        raise error

    assert count(["s3://runs/digits"], pages_of=pages_of) == [size_of(problem="no permission")]


def test_a_listing_that_fails_halfway_is_a_lower_bound():
    def pages_of(url):
        yield [70]
        raise StoreError("the bucket is away")

    assert count(["s3://runs/digits"], pages_of=pages_of) == [size_of(bytes=70, problem="the bucket is away")]


def test_slow_folders_are_given_up_together_with_what_was_listed():
    is_over = threading.Event()

    def pages_of(url):
        if url.startswith("gs://"):
            yield [70]
        is_over.wait()
        yield [1]

    try:
        found = count(["s3://runs/digits", "gs://runs/digits"], seconds=0.2, pages_of=pages_of)
    finally:
        is_over.set()
    late = "the bucket was not listed to its end within 0.2 s"
    assert found == [size_of(problem=late), size_of(url="gs://runs/digits", bytes=70, problem=late)]


def test_a_bucket_that_hides_its_region_is_counted():
    def region_of(url):
        raise StoreError("s3:GetBucketLocation is denied")

    found = count_folders(["s3://runs/digits"], region_of, pages_of=lambda url: iter([[7]]))
    assert found == [size_of(bytes=7, is_whole=True)]
