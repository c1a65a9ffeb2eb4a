"""Locations of spotrl's files, and settings from the environment and the user's own configuration."""

from pathlib import Path

import platformdirs
from pydantic import Field
from pydantic_settings import BaseSettings, SettingsConfigDict


class Settings(BaseSettings):
    """Paths of spotrl's files, read from `SPOTRL_HOME` and `SPOTRL_CONFIG`.

    An empty variable counts as unset: an empty path would be the current folder. Other `SPOTRL_*` variables override
    fields of the job and are ignored here. Two variables do neither: `SPOTRL_GCP_BILLING_ENDPOINT` and
    `SPOTRL_GCP_COMPUTE_ENDPOINT` (launcher/market/sources/gcp.py).
    """

    model_config = SettingsConfigDict(
        env_prefix="SPOTRL_", env_ignore_empty=True, frozen=True, extra="ignore", use_attribute_docstrings=True
    )

    home: Path = Field(default_factory=lambda: Path(platformdirs.user_state_dir("spotrl")))
    """Ledger, logs, and the run folders of the local infra."""
    config: Path = Field(default_factory=lambda: Path(platformdirs.user_config_dir("spotrl")) / "config.yaml")
    """A partial job file with the user's own defaults. The file is optional."""


def home() -> Path:
    return Settings().home.expanduser().absolute()


def config_path() -> Path:
    return Settings().config.expanduser().absolute()


def ledger_path() -> Path:
    return home() / "ledger.sqlite"


def runs_folder() -> Path:
    """Return the folder where a run of the local infra keeps the nodes' disks and the checkpoints."""
    return home() / "runs"


def simulations_path() -> Path:
    """Return the folder of the kept results of `spotrl simulate`."""
    return home() / "simulations"
