"""Facts in the files of a run on clouds that the ledger has not: accounts, and the ids of instances.

A run whose files were removed, or a damaged file, has none.
"""

import json
from pathlib import Path
from typing import Any

from launcher.ledger.models import Run


def accounts_of(run: Run) -> dict[str, str]:
    """Return the account or project that the run used, by cloud."""
    return dict(_read(Path(run.folder) / "common.json").get("accounts", {}))


def owners_of(run: Run) -> dict[str, str]:
    """Return the value of the label `spotrl-owner`, by cloud."""
    return dict(_read(Path(run.folder) / "common.json").get("owners", {}))


def instance_id(run: Run, node: str) -> str:
    """Return the cloud's id of a node's instance; empty if the files do not say."""
    return str(_read(Path(run.folder) / "nodes" / node / "machine.json").get("id", ""))


def _read(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}
