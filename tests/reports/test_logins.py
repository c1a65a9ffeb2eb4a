"""A login that expires while a run goes on: buying waits, nothing ends, nothing is denied, and a new login heals it.

The clouds' clients are real: botocore asks a server of the test, and google-auth has credentials of the test.
"""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import google.auth
import google.auth.credentials
import pytest
import requests
from botocore import exceptions as aws
from google.auth import exceptions as google_errors

from launcher.clouds.aws import AwsApi
from launcher.clouds.base import CloudRefused, CloudUnreachable
from launcher.clouds.gce import GceApi
from launcher.provision.sky.outcome import Failed, outcome_of
from tests.launcher.cluster.stage import ledger
from tests.launcher.cluster.test_moving import Stage
from tests.launcher.cluster.test_sky_provisioner import NODE
from tests.launcher.cluster.test_sky_provisioner import Stage as ProvisionerStage

CODES = [
    *("ExpiredToken", "ExpiredTokenException", "RequestExpired", "InvalidClientTokenId"),
    *("InvalidAccessKeyId", "SignatureDoesNotMatch", "RequestTimeTooSkewed"),
]
NOT_VALID = "AWS was not able to validate the provided access credentials"

CLIENT_ERRORS = [
    aws.TokenRetrievalError(provider="sso", error_msg="Token has expired and refresh failed"),
    aws.UnauthorizedSSOTokenError(),
    aws.SSOTokenLoadError(error_msg="the file is not there"),
    aws.CredentialRetrievalError(provider="process", error_msg="exit 1"),
    aws.NoCredentialsError(),
    aws.LoginRefreshRequired(),
]

LOG_TEXTS = {
    "aws": [
        "An error occurred (ExpiredToken) when calling the RunInstances operation: The provided token has expired.",
        "An error occurred (RequestExpired) when calling the DescribeImages operation: Request has expired.",
        "botocore.exceptions.TokenRetrievalError: Error when retrieving token from sso: Token has expired and "
        "refresh failed",
        "botocore.exceptions.UnauthorizedSSOTokenError: The SSO session associated with this profile has expired or is "
        "otherwise invalid.",
        "botocore.exceptions.NoCredentialsError: Unable to locate credentials",
        f"us-west-2a: An error occurred (AuthFailure) when calling the RunInstances operation: {NOT_VALID}",
        "An error occurred (SignatureDoesNotMatch) when calling the ListRoles operation: Signature expired",
    ],
    "gcp": [
        "google.auth.exceptions.RefreshError: Reauthentication is needed. Please run `gcloud auth application-default "
        "login`",
        "google.auth.exceptions.RefreshError: ('invalid_grant: Token has been expired or revoked.', {})",
        "sky.exceptions.InvalidCloudCredentials: Getting project ID or user identity failed: reauth related error "
        "(invalid_rapt)",
    ],
}
TEXTS = [
    pytest.param(cloud, text, marks=() if text == texts[0] else pytest.mark.slow)
    for cloud, texts in LOG_TEXTS.items()
    for text in texts
]
COMMANDS = {"aws": "`aws sso login`", "gcp": "`gcloud auth login"}


@pytest.fixture
def sessions(tmp_path, monkeypatch):
    monkeypatch.setenv("SPOTRL_HOME", str(tmp_path))
    return ledger(tmp_path)


@pytest.fixture
def aws_that_takes_new_keys(tmp_path, monkeypatch):
    """Serve AWS's identity service, which answers with `code` until the caller's key is NEWKEY."""

    class Answers(BaseHTTPRequestHandler):
        code = "ExpiredToken"

        def do_POST(self):
            self.rfile.read(int(self.headers["Content-Length"]))
            is_new = "NEWKEY" in self.headers["Authorization"]
            inner = (
                "<GetCallerIdentityResponse><GetCallerIdentityResult><Arn>arn:aws:iam::1:user/ada</Arn>"
                "<Account>1</Account></GetCallerIdentityResult></GetCallerIdentityResponse>"
                if is_new
                else f"<ErrorResponse><Error><Code>{self.code}</Code><Message>expired</Message></Error></ErrorResponse>"
            )
            self.send_response(200 if is_new else 403)
            self.send_header("Content-Length", str(len(inner)))
            self.end_headers()
            self.wfile.write(inner.encode())

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Answers)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    keys = tmp_path / "credentials"
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(keys))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{server.server_port}")

    def renew(key: str) -> None:
        keys.write_text(f"[default]\naws_access_key_id = {key}\naws_secret_access_key = secret\n")

    yield Answers, renew
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.parametrize("code", CODES)
def test_renewed_aws_keys_are_read_by_a_living_process(aws_that_takes_new_keys, code):
    answers, renew = aws_that_takes_new_keys
    answers.code = code
    renew("OLDKEY")
    api = AwsApi()
    for _ in range(2):
        with pytest.raises(CloudUnreachable, match="log in again: `aws sso login`"):
            api.caller()
    renew("NEWKEY")
    assert api.caller().owner == "ada"


@pytest.mark.parametrize(("region", "kind"), [("us-east-1", CloudUnreachable), ("eu-south-2", CloudRefused)])
def test_keys_that_were_turned_off_are_no_region_that_is_off(region, kind):
    error = aws.ClientError({"Error": {"Code": "AuthFailure", "Message": NOT_VALID}}, "DescribeInstances")
    with pytest.raises(kind, match="AuthFailure") as refusal:
        AwsApi(lambda service, place: Raising(error)).instances(region)
    assert ("log in again" in str(refusal.value)) is (kind is CloudUnreachable)
    assert outcome_of("", f"{region}: (AuthFailure) {NOT_VALID}").failed is (
        Failed.LOGIN if kind is CloudUnreachable else Failed.DENIED
    )


def test_keys_that_appear_while_a_process_runs_are_found(aws_that_takes_new_keys):
    _, renew = aws_that_takes_new_keys
    api = AwsApi()
    with pytest.raises(CloudUnreachable, match="log in again"):
        api.caller()
    renew("NEWKEY")
    assert api.caller().owner == "ada"


class Raising:
    """A client of AWS, each of whose calls raises the error."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def __getattr__(self, name):
        def call(*_, **__):
            raise self.error

        return call


@pytest.mark.parametrize("error", CLIENT_ERRORS, ids=lambda error: type(error).__name__)
def test_every_error_of_an_aws_login_is_the_same_kind(error):
    api = AwsApi(lambda service, region: Raising(error))
    for ask in (api.caller, api.regions, lambda: api.instances("us-east-1"), lambda: api.resources("us-east-1")):
        with pytest.raises(CloudUnreachable, match="log in again: `aws sso login`"):
            ask()


class Login(google.auth.credentials.Credentials):
    """Google credentials that hold or not."""

    def __init__(self, error: Exception | None) -> None:
        super().__init__()
        self.error = error

    def refresh(self, request):
        if self.error is not None:
            raise self.error
        self.token = "token"


@pytest.mark.parametrize(
    "error",
    [
        google_errors.RefreshError("Reauthentication is needed"),
        google_errors.ReauthFailError("invalid_rapt"),
        google_errors.RefreshError("invalid_grant: Token has been expired or revoked."),
        None,
    ],
    ids=str,
)
def test_a_renewed_google_login_is_read_by_a_living_process(monkeypatch, error):
    """Without an error the old token is refused by the service itself, with 401."""
    logins = [Login(error)]

    def answer(session, method, url, **_):
        found = requests.Response()
        found.status_code = 200 if logins[0].error is None and len(logins) == 2 else 401
        found._content = json.dumps({"items": [{"name": "r1"}]}).encode()
        return found

    monkeypatch.setattr(google.auth, "default", lambda scopes=None: (logins[0], "project"))
    monkeypatch.setattr(requests.Session, "request", answer)
    api = GceApi({})
    for _ in range(2):
        with pytest.raises(CloudUnreachable, match="log in again: `gcloud auth login"):
            api.regions()
    logins[:] = [Login(None), Login(None)]
    assert api.regions() == ["r1"]


@pytest.mark.slow
@pytest.mark.parametrize("error", CLIENT_ERRORS[:3], ids=lambda error: type(error).__name__)
def test_a_node_waits_for_a_login_before_its_launch_and_is_not_denied(tmp_path, error):
    stage = ProvisionerStage(tmp_path)
    expired = AwsApi(lambda service, region: Raising(error))
    plain, stage.cloud.prepare = stage.cloud.prepare, lambda *_, **__: expired.caller()
    stage.request()
    fact = stage.passes(4 * 3600, step=30)[NODE]
    assert fact.status == "unknown"
    assert "log in again: `aws sso login`" in fact.login
    stage.cloud.prepare = plain
    stage.passes(120)
    assert len(stage.sky.launches) == 1


@pytest.mark.parametrize(("cloud", "text"), TEXTS)
def test_an_expired_login_in_skypilots_log_sends_the_launch_again_until_it_holds(tmp_path, cloud, text):
    stage = ProvisionerStage(tmp_path)
    stage.request()
    for _ in range(12):
        stage.passes(1)
        stage.sky.finish(NODE, outcome_of("ResourcesUnavailableError\nfailed to provision", f"a log\n{text}\nmore"))
        fact = stage.passes(120, step=5)[NODE]
        assert fact.status == "unknown"
    assert COMMANDS[cloud] in fact.login
    assert 5 < len(stage.sky.launches) <= 13
    stage.passes(70)
    assert stage.process().observe()[0].login == fact.login, "another controller waits for the same"
    stage.sky.finish(NODE)
    fact = stage.passes(10)[NODE]
    assert (fact.status, fact.login) == ("pending", "")
    assert stage.file(NODE, "login")["user"] == "ubuntu"


@pytest.mark.slow
def test_a_night_without_a_login_costs_a_run_no_node_and_says_what_to_do(sessions):
    stage = Stage(sessions)
    stage.passes(30, step_ms=30_000)
    stage.cloud.answers |= {"trainers": "login", "rollouts": "login"}
    stage.cloud.words = "aws sts: the token has expired; log in again: `aws sso login`"
    stage.cloud.preempt("demo-spot-0-g0")
    stage.passes(120, step_ms=60_000)
    assert stage.cloud.released == []
    assert set(stage.live()) == {"demo-trainer-g0", "demo-spot-1-g0", "demo-spot-0-g1"}
    assert stage.reason() == ("running", f"waits: {stage.cloud.words}")
    stage.cloud.answers.clear()
    stage.passes(10)
    assert stage.reason() == ("running", "")
    assert len(stage.live()) == 3


@pytest.mark.slow
def test_a_trainer_lost_in_a_night_without_a_login_is_replaced_after_it(sessions):
    stage = Stage(sessions)
    stage.passes(30, step_ms=30_000)
    stage.cloud.answers |= {"trainers": "login", "rollouts": "login"}
    stage.cloud.words = "gcp: invalid_grant; log in again: `gcloud auth login`"
    stage.cloud.end("demo-trainer-g0", "the machine is gone")
    stage.passes(120, step_ms=60_000)
    assert stage.cloud.released == []
    assert stage.reason() == ("running", f"waits: {stage.cloud.words}")
    assert len([name for name in stage.records() if "trainer" in name]) == 2, "one request, which waits"
    stage.cloud.answers.clear()
    stage.passes(10)
    assert "demo-trainer-g1" in stage.live()
    assert len(stage.live()) == 3
