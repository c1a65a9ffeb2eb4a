"""Names of buckets, by the rules of S3 and Google Cloud Storage. A wrong name would be found after a purchase."""

import re

SCHEMES = {"aws": "s3://", "gcp": "gs://"}

NAME_LENGTH = (3, 63)
"""Fewest and most characters of a bucket's name; on Google Cloud, of each part of a name with dots."""

DOTTED_LENGTH = 222
"""Most characters of a name with dots on Google Cloud."""

PREFIX_BYTES = 512
"""Most bytes of the folder in a bucket. A whole key has at most 1,024, and spotrl's own paths need some of them."""

S3_PREFIXES = ("xn--", "sthree-", "amzn-s3-demo-")
S3_SUFFIXES = ("-s3alias", "--ol-s3", ".mrap", "--x-s3", "--table-s3")
"""Beginnings and ends that S3 keeps for itself."""

GOOGLE = re.compile(r"google|g00gle|g0ogle|go0gle")
"""What a name on Google Cloud must not contain: its own name, and names that look like it."""


def problem_with_store(cloud: str, url: object) -> str:
    """Return what is wrong with the address of a cloud's bucket, with what is allowed; empty if nothing is."""
    scheme = SCHEMES[cloud]
    if not isinstance(url, str) or not url.startswith(scheme):
        return f"use a bucket of that cloud, like {scheme}my-bucket/spotrl"
    name, _, prefix = url.removeprefix(scheme).partition("/")
    if problem := (_problem_on_aws(name) if cloud == "aws" else _problem_on_google_cloud(name)):
        return f"{problem}; use a bucket of that cloud, like {scheme}my-bucket/spotrl"
    return _problem_with_prefix(prefix.removesuffix("/"))


def _problem_with_name(name: str, letters: str, words: str, most: int) -> str:
    if not NAME_LENGTH[0] <= len(name) <= most:
        return f"its bucket's name has {len(name)} characters, and {NAME_LENGTH[0]} to {most} are allowed"
    if wrong := next((letter for letter in name if not re.fullmatch(letters, letter, re.ASCII)), None):
        return f"its bucket's name has {wrong!r}, and {words} are allowed"
    if not (name[0].isalnum() and name[-1].isalnum()):
        return "its bucket's name must begin and end with a letter or a digit"
    if ".." in name:
        return "its bucket's name has two dots in a row"
    if re.fullmatch(r"[0-9]+(\.[0-9]+){3}", name, re.ASCII):
        return "its bucket's name looks like an IP address"
    return ""


def _problem_on_aws(name: str) -> str:
    words = "small letters, digits, dots and hyphens"
    if problem := _problem_with_name(name, r"[a-z0-9.-]", words, NAME_LENGTH[1]):
        return problem
    kept = next((part for part in S3_PREFIXES if name.startswith(part)), "")
    kept = kept or next((part for part in S3_SUFFIXES if name.endswith(part)), "")
    return f"its bucket's name has {kept!r}, which S3 keeps for itself" if kept else ""


def _problem_on_google_cloud(name: str) -> str:
    words = "small letters, digits, dots, hyphens and underscores"
    most = DOTTED_LENGTH if "." in name else NAME_LENGTH[1]
    if problem := _problem_with_name(name, r"[a-z0-9._-]", words, most):
        return problem
    if longest := next((part for part in name.split(".") if len(part) > NAME_LENGTH[1]), ""):
        return f"a part of its bucket's name has {len(longest)} characters, and {NAME_LENGTH[1]} are allowed"
    if name.startswith("goog") or GOOGLE.search(name):
        return "its bucket's name begins with 'goog' or contains 'google', which Google Cloud refuses"
    return ""


def _problem_with_prefix(prefix: str) -> str:
    """Return what is wrong with the folder in the bucket. URLs read `?`, `#` and `%` in their own way."""
    if len(prefix.encode(errors="replace")) > PREFIX_BYTES:
        return f"its folder has more than {PREFIX_BYTES} bytes; use a shorter one"
    if wrong := next((letter for letter in prefix if not letter.isprintable() or letter in " ?#%\\"), None):
        return f"its folder has {wrong!r}; use letters, digits, '-', '_' and '.', like spotrl/digits"
    if prefix and any(part in ("", ".", "..") for part in prefix.split("/")):
        return "its folder has an empty part, '.' or '..'; use names between the slashes, like spotrl/digits"
    return ""
