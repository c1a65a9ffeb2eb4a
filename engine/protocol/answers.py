"""Answers of the coordinator."""

from collections.abc import Mapping
from typing import Any


def is_nothing(answer: Mapping[str, Any]) -> bool:
    """Return True if the answer holds no news. The server may then keep a patient caller waiting."""
    if answer["do"] == "results":
        return not answer["results"] and not answer["stop"] and not answer["poisoned"]
    return bool(answer["do"] == "wait")
