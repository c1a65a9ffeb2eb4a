"""A controller process whose nodes are fake agents: `python tests/launcher/cluster/controlled.py RUN`."""

import logging
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3]))

from launcher.controller.run_process import run_controller
from launcher.ledger.store import find_run, open_ledger
from launcher.provision.local.provisioner import LocalProvisioner
from launcher.settings import ledger_path
from tests.launcher.cluster.stage import FAKE_AGENT

if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO)
    sessions = open_ledger(ledger_path())
    with sessions() as session:
        run = find_run(session, sys.argv[1])
    run_controller(sessions, run.name, provisioner=LocalProvisioner(Path(run.folder), run.clock, None, FAKE_AGENT))
