"""Send what the sinks of a run that is over still lack."""

from sqlalchemy.orm import Session, sessionmaker

from launcher.decide.facts import OVER, Stage
from launcher.exit_codes import Failure
from launcher.job.schema import Job
from launcher.ledger.store import check_kept, current_status, find_run
from launcher.sinks.shipper import Shipped, shippers_of


class NotSendable(Failure):
    """The run has no sink, goes on, or is being sent by another process."""


def send_late(sessions: sessionmaker[Session], run_name: str) -> list[Shipped]:
    """Send all records to each sink of the run's job, and say what each sink has. Raises NotSendable."""
    with sessions() as session:
        run = find_run(session, run_name)
        check_kept(session, run)
        status = current_status(session, run)
    section = Job.model_validate(run.job).logging
    if section.wandb is None and section.mlflow is None:
        raise NotSendable(
            f"the job of {run_name} names no sink; only a run whose job has `logging: {{wandb: ...}}` or "
            "`logging: {mlflow: ...}` has numbers to send"
        )
    if status is None or Stage(status.status) not in OVER:
        status_text = "without a status" if status is None else status.status
        raise NotSendable(f"{run_name} is {status_text}, and its controller sends the numbers; try again after its end")
    shippers = shippers_of(sessions, run, section, run.clock)
    if not all(shipper.becomes_only_sender() for shipper in shippers):
        raise NotSendable(
            f"another process still sends the numbers of {run_name}; try again in a minute, or end the process: "
            f"fuser {run.folder}/logging/*.lock"
        )
    return [shipper.send_all() for shipper in shippers]
