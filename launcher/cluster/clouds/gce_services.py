"""Addresses of Google's services, and their answers that are not a yes."""

COMPUTE = ("SPOTRL_GCP_COMPUTE_ENDPOINT", "https://compute.googleapis.com", "/compute/v1/projects/{project}")
IAM = ("SPOTRL_GCP_IAM_ENDPOINT", "https://iam.googleapis.com", "/v1/projects/{project}")
PROJECTS = (
    "SPOTRL_GCP_RESOURCE_MANAGER_ENDPOINT",
    "https://cloudresourcemanager.googleapis.com",
    "/v1/projects/{project}",
)
"""Environment variable, default, path."""


def compute_of(project: str) -> tuple[str, str, str]:
    """Return Compute Engine of another project than the one that asks."""
    variable, default, path = COMPUTE
    return variable, default, path.format(project=project)


IAM_OF_ANY = (IAM[0], IAM[1], IAM[2].format(project="-"))
"""Service accounts of any project, by their e-mail."""


class Answer(Exception):
    """An answer that is not a yes, for those callers that know what to do about it."""

    def __init__(self, status: int, reason: str, text: str) -> None:
        super().__init__(f"{status} {reason}: {text}")
        self.status, self.reason, self.text = status, reason, text
