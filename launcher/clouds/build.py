"""Choose the implementation of a cloud by name."""

import os
from collections.abc import Mapping

from launcher.clouds.base import CloudApi


def build_cloud_api(cloud: str, environ: Mapping[str, str] = os.environ) -> CloudApi:
    """Return the API of one cloud with the environment's credentials. No call is made yet."""
    match cloud:
        case "aws":
            from launcher.clouds.aws import AwsApi

            return AwsApi()
        case "gcp":
            from launcher.clouds.gce import GceApi

            return GceApi(environ)
        case _:
            raise ValueError(f"cloud is {cloud!r}; there are aws and gcp")
