"""Addresses of Google's services, and their error answers."""

COMPUTE = ("SPOTRL_GCP_COMPUTE_ENDPOINT", "https://compute.googleapis.com", "/compute/v1/projects/{project}")
IAM = ("SPOTRL_GCP_IAM_ENDPOINT", "https://iam.googleapis.com", "/v1/projects/{project}")
PROJECTS = (
    "SPOTRL_GCP_RESOURCE_MANAGER_ENDPOINT",
    "https://cloudresourcemanager.googleapis.com",
    "/v1/projects/{project}",
)
"""Addresses of the services: variable with another server's address, default server, path on the server."""


def compute_of(project: str) -> tuple[str, str, str]:
    """Return Compute Engine's address for another project than the caller's."""
    variable, default, path = COMPUTE
    return variable, default, path.format(project=project)


IAM_OF_ANY = (IAM[0], IAM[1], IAM[2].format(project="-"))
"""Address of service accounts in any project, by e-mail."""


class Answer(Exception):
    """An HTTP error from a Google service. A caller that expects the status handles the error."""

    def __init__(self, status: int, reason: str, text: str) -> None:
        super().__init__(f"{status} {reason}: {text}")
        self.status, self.reason, self.text = status, reason, text
