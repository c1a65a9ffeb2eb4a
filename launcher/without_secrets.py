"""Replace secrets in text that is kept or shown: commands in the ledger, job files in reports.

Jobs name environment variables instead of holding keys, so a secret can only come in by mistake: a password in an
address, a key as the value of a flag. Better one word too many replaced than a key in a report that is sent around.
"""

import re
from collections.abc import Collection, Mapping
from typing import Any

SECRET = "***"

_WORDS = (
    r"(?:api_?key|access_?key|key|keys|token|tokens|secret|secrets|pass|password|passwd|passphrase|"
    r"credential|credentials|auth|authorization|webhook|sig|signature)"
)
SECRET_NAME = re.compile(rf"(?:^|[._-]){_WORDS}$", re.IGNORECASE)
"""A name of a field, a flag or a parameter whose value is a secret: its last word says so."""

SECRET_VARIABLE = re.compile(r"KEY|TOKEN|SECRET|PASS|CREDENTIAL|WEBHOOK|AUTH", re.IGNORECASE)
"""A name of an environment variable whose value is a secret."""

LEAST_LENGTH = 8
"""Shortest value of a variable that is searched. A shorter value is also a part of ordinary words."""

_USER = re.compile(r"(?<=://)[^/\s?#'\"]*@")
_PARAMETER = re.compile(rf"(?<=[?&;])((?:[\w.-]*[._-])?{_WORDS})=[^&\s'\"#]+", re.IGNORECASE)
_WEBHOOK = re.compile(r"(https?://(?:hooks\.[\w.-]+|[\w.-]+/api/webhooks)/)[^\s'\"]+")
_SHAPES = re.compile(
    r"\b(?:sk-[\w-]{8,}|hf_\w{8,}|gh[opsu]_\w{16,}|github_pat_\w{16,}|glpat-[\w-]{16,}|xox[abeoprs]-[\w-]{8,}"
    r"|(?:AKIA|ASIA)[0-9A-Z]{12,}|AIza[\w-]{20,}|ya29\.[\w.-]{16,}|eyJ[\w-]{8,}\.[\w-]{8,}[\w.-]*)"
)
"""Keys that providers mark: OpenAI, Hugging Face, GitHub, GitLab, Slack, AWS, Google, and JSON web tokens."""


def without_secrets(text: str, values: Collection[str] = ()) -> str:
    """Return the text with passwords of addresses, marked keys and `values` replaced by `***`."""
    for value in sorted(values, key=len, reverse=True):  # the longest first: a value may hold a shorter one
        if len(value) >= LEAST_LENGTH:
            text = text.replace(value, SECRET)
    text = _USER.sub(f"{SECRET}@", text)
    text = _WEBHOOK.sub(rf"\g<1>{SECRET}", text)
    text = _PARAMETER.sub(rf"\g<1>={SECRET}", text)
    return _SHAPES.sub(SECRET, text)


def job_without_secrets(value: Any) -> Any:
    """Return a part of a checked job with every text in it without secrets."""
    match value:
        case str():
            return without_secrets(value)
        case Mapping():
            return {name: job_without_secrets(inner) for name, inner in value.items()}
        case list() | tuple():
            return [job_without_secrets(inner) for inner in value]
        case _:
            return value


def words_without_secrets(words: Collection[str], values: Collection[str] = ()) -> list[str]:
    """Return the words of a command without secrets. The value of `--api-key X` or `reward.http.key=X` is one too."""
    kept: list[str] = []
    hides_next = False
    for word in words:
        name, equals, value = word.partition("=")
        if hides_next and not word.startswith("-"):
            kept.append(SECRET)
        elif equals and value and SECRET_NAME.search(name):
            kept.append(f"{name}={SECRET}")
        else:
            kept.append(without_secrets(word, values))
        hides_next = word.startswith("-") and not equals and SECRET_NAME.search(word) is not None
    return kept


def secret_values(environ: Mapping[str, str], names: Collection[str] = ()) -> list[str]:
    """Return the values of the variables `names`, and of those whose names sound like a secret."""
    return [value for name, value in environ.items() if value and (name in names or SECRET_VARIABLE.search(name))]
