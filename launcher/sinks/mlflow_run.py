"""A run in MLflow, through its own client.

The run is found again by its tag. Each record's last metric is `record`, its number plus 1, so the newest value of
`record` says how many records the server holds.
"""

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from launcher.sinks.messages import ENDS, Open, Opened, Record

RUN_TAG = "spotrl.run"
MOST_METRICS, MOST_PARAMS, LONGEST_PARAM = 1000, 100, 6000
"""Limits of one request, and of a parameter's text (MLflow's REST API, `runs/log-batch`)."""

STATES: Mapping[ENDS, str] = {"finished": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}


class MlflowRun:
    """One run of MLflow. The iteration is MLflow's step, and the run's clock its timestamp."""

    def __init__(self) -> None:
        """Load the client. Raises ImportError."""
        # Read by mlflow when it is imported. An outage is answered by the controller, which tries again.
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "20")
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        import mlflow
        import mlflow.entities

        self._mlflow: Any = mlflow
        self._client: Any = None
        self._run_id = ""

    def open(self, message: Open) -> Opened:
        folder = Path(message.folder)
        folder.mkdir(parents=True, exist_ok=True)
        uri = message.settings.get("tracking_uri") or os.environ.get("MLFLOW_TRACKING_URI")
        uri = uri or f"sqlite:///{folder / 'mlflow.db'}"
        self._client = self._mlflow.MlflowClient(tracking_uri=uri)
        experiment = self._experiment(message.settings["experiment"], folder if uri.startswith("sqlite") else None)
        runs = self._client.search_runs([experiment], f"tags.`{RUN_TAG}` = '{message.run_id}'", max_results=1)
        if runs:
            self._run_id, held = runs[0].info.run_id, int(runs[0].data.metrics.get("record", 0))
            self._client.update_run(self._run_id, status="RUNNING")
        else:
            tags = {RUN_TAG: message.run_id, **{f"spotrl.{name}": text for name, text in message.facts.items()}}
            self._run_id, held = self._client.create_run(experiment, run_name=message.name, tags=tags).info.run_id, 0
        params = [self._mlflow.entities.Param(name, text[:LONGEST_PARAM]) for name, text in _flat("job", message.job)]
        for n in range(0, len(params), MOST_PARAMS):
            self._client.log_batch(self._run_id, params=params[n : n + MOST_PARAMS])
        return Opened(held=held, where=f"{uri}, experiment {message.settings['experiment']}, run {self._run_id}")

    def add(self, records: tuple[Record, ...], total: int) -> None:
        for record in records:
            if record.sheet is not None:
                self._client.log_artifact(self._run_id, record.sheet, artifact_path="images")
        metric = self._mlflow.entities.Metric
        waiting: list[Any] = []
        for record in records:
            more = [metric(name, value, record.at_ms, record.iteration) for name, value in record.values.items()]
            # Its own step: MLflow takes the value of the largest step as the newest, and an iteration may be redone.
            more.append(metric("record", float(record.number + 1), record.at_ms, record.number))
            if len(waiting) + len(more) > MOST_METRICS:
                self._client.log_batch(self._run_id, metrics=waiting)
                waiting = []
            waiting += more
        if waiting:
            self._client.log_batch(self._run_id, metrics=waiting)

    def close(self, state: ENDS) -> None:
        self._client.set_terminated(self._run_id, STATES[state])

    def _experiment(self, name: str, folder: Path | None) -> str:
        """Return the id of the experiment, which is made if missing. `folder`: of a database without a server."""
        experiment = self._client.get_experiment_by_name(name)
        if experiment is not None:
            return str(experiment.experiment_id)
        return str(self._client.create_experiment(name, (folder / "artifacts").as_uri() if folder else None))


def _flat(name: str, value: Any) -> Iterator[tuple[str, str]]:
    """Yield the fields of the job as dotted names with their text. MLflow's parameters are flat."""
    if isinstance(value, Mapping) and value:
        for key, inner in value.items():
            yield from _flat(f"{name}.{key}", inner)
    elif value not in (None, [], {}, ""):
        yield name, str(value)
