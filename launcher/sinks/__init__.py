"""Copies of a run's numbers to the tools where teams keep theirs: W&B and MLflow (`logging` in the job)."""
