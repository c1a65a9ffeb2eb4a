"""Refuse to change the files of a run that belong to another ledger.

A ledger keeps the folder of a run as an absolute path. So a copy of SPOTRL_HOME, made as a backup or for another
machine's disk, still names the folders of the first: a removal there would delete the first one's weights, and a second
controller would write into the folders of the first one's nodes.
"""

import shlex
from pathlib import Path

from launcher.exit_codes import Failure
from launcher.ledger.models import Run
from launcher.settings import home


class CopiedLedger(Failure):
    """The files of the run are outside of SPOTRL_HOME."""


def check_own_folder(run: Run) -> None:
    """Raise CopiedLedger if the run's folder exists outside of SPOTRL_HOME. A folder that is gone hinders nothing."""
    folder = Path(run.folder)
    if folder.exists() and not folder.resolve().is_relative_to(home().resolve()):
        raise CopiedLedger(
            f"the files of {run.name} are in {folder}, outside of {home()}: this ledger is a copy of another, to which "
            f"they belong; use that one (SPOTRL_HOME={shlex.quote(str(folder.parents[1]))}), or move them away"
        )
