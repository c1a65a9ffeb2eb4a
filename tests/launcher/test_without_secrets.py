"""No secret of a command or of a job file is kept or shown."""

import pytest

from launcher.without_secrets import job_without_secrets, secret_values, without_secrets, words_without_secrets

MARKS = ("AKIA", "ASIA", "AIza", "ghp_", "gho_", "ghs_", "ghu_", "github_pat_", "glpat-", "xoxb-", "xoxp-", "ya29.")
"""Beginnings of keys by which AWS, Google, GitHub, GitLab and Slack mark them."""


@pytest.mark.parametrize(
    ("word", "kept"),
    [
        ("job.yaml", "job.yaml"),
        ("reward.http.key=abc", "reward.http.key=***"),
        ("secrets=[HF_TOKEN]", "secrets=***"),
        ("--api-key=abc", "--api-key=***"),
        ("store.aws=s3://my-bucket/spotrl", "store.aws=s3://my-bucket/spotrl"),
        ("model.path=/models/key/monkey=1", "model.path=/models/key/monkey=1"),
        ("tracking_uri=http://me:pass@host:5000/x", "tracking_uri=http://***@host:5000/x"),
        ("tracking_uri=https://token@host", "tracking_uri=https://***@host"),
        ("tracking_uri=https://me:p@ss@host/@x", "tracking_uri=https://***@host/@x"),
        ("url=https://host/a?b=1&api_key=xyz&c=2", "url=https://host/a?b=1&api_key=***&c=2"),
        ("url=https://hooks.slack.com/services/T0/B0/xyz", "url=https://hooks.slack.com/***"),
        ("url=https://discord.com/api/webhooks/1/xyz", "url=https://discord.com/api/webhooks/***"),
        ("x=sk-abcdefgh1234", "x=***"),
        ("x=hf_abcdefgh1234", "x=***"),
        *((f"x={begin}{'A' * 40}", "x=***") for begin in MARKS),
        *((f"--{name}=abc", f"--{name}=***") for name in ("access-key", "my_password", "auth", "webhook", "sig")),
        ("url=https://host/a?b=1;passwd=xyz", "url=https://host/a?b=1;passwd=***"),
        ("x=eyJhbGciOiJI.eyJzdWIiOiIx.abc", "x=***"),
        ("name=desk-lamp", "name=desk-lamp"),
        ("tokens_per_prompt=4", "tokens_per_prompt=4"),
    ],
)
def test_a_secret_in_a_word_is_replaced_and_the_rest_stays(word, kept):
    assert words_without_secrets([word]) == [kept]


def test_the_word_after_a_flag_with_a_key_is_replaced():
    words = ["spotrl", "launch", "--token", "abc", "--name", "key", "--password", "--yes"]
    assert words_without_secrets(words) == [
        *("spotrl", "launch", "--token", "***", "--name", "key", "--password", "--yes")
    ]
    assert words_without_secrets(["--name=my-token", "job.yaml"]) == ["--name=my-token", "job.yaml"]


def test_values_of_secret_variables_are_replaced_anywhere():
    environ = {"JUDGE": "kept-by-name-1", "MY_API_KEY": "longer-secret", "PATH": "/usr/bin:/bin", "SHORT_KEY": "yes"}
    values = secret_values(environ, ["JUDGE"])
    assert set(values) == {"kept-by-name-1", "longer-secret", "yes"}
    text = "prompts=kept-by-name-1/longer-secret/yes/usr/bin:/bin"
    assert without_secrets(text, values) == "prompts=***/***/yes/usr/bin:/bin"
    shorter, longer = "8-digits", "8-digits-and-more"
    assert without_secrets(f"{longer} {shorter} 7-digit", [shorter, longer, "7-digit"]) == "*** *** 7-digit"


def test_a_checked_job_keeps_its_form():
    job = {
        "reward": [{"url": "https://me:pass@host", "weight": 0.5}],
        "seed": 3,
        "store": None,
        "tags": ("hf_abcdefgh1",),
    }
    assert job_without_secrets(job) == {
        "reward": [{"url": "https://***@host", "weight": 0.5}],
        "seed": 3,
        "store": None,
        "tags": ["***"],
    }


def test_a_job_file_keeps_the_names_of_variables():
    text = "secrets: [HF_TOKEN]\nreward:\n  http: {url: 'https://me:pass@host/score', key: JUDGE_KEY}\n"
    assert without_secrets(text) == text.replace("me:pass", "***")
