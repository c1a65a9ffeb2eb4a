"""Identities and networks that a job names: valid values, and their meaning for a region."""

import pytest

from launcher.job.checked import JobError
from launcher.job.company import NOTHING_NAMED, Named
from launcher.job.load import load_job
from launcher.job.resolved import resolve
from launcher.job.schema import Job
from launcher.ledger.store import open_ledger
from launcher.market.offers import current_catalog
from launcher.placement.plan import PlacementError
from launcher.services.planning import cloud_plan

CLOUDS = "infra: aws,gcp\n"

AWS = "network: {aws: {us-east-1: {vpc: vpc-1, security_group: nodes, subnets: [subnet-1], public_addresses: false}}}\n"

GCP = (
    "identity: {gcp: node@other-project.iam.gserviceaccount.com}\n"
    "network: {gcp: {network: host/nodes, subnets: {us-central1: central}, ssh_proxy: ssh -W %h:%p bastion}}\n"
)


@pytest.fixture
def load(tmp_path):
    def load(text, clouds=CLOUDS):
        (tmp_path / "job.yaml").write_text(clouds + text)
        return load_job(tmp_path / "job.yaml").job

    return load


def test_no_identity_or_network_is_named_by_default(load):
    assert load("").named("aws", "us-east-1") == load("").named("gcp", "us-central1") == NOTHING_NAMED


def test_a_named_vpc_restricts_nodes_to_its_region(load):
    job = load(AWS)
    assert job.named("aws", "us-east-1") == Named(
        network="vpc-1", group="nodes", subnets=("subnet-1",), public_addresses=False
    )
    assert job.network.reaches("aws", "us-east-1")
    assert not job.network.reaches("aws", "us-west-2")
    assert job.network.reaches("gcp", "us-central1")


def test_a_google_network_is_named_with_a_subnet_per_region(load):
    job = load(GCP)
    assert job.named("gcp", "us-central1") == Named(
        identity="node@other-project.iam.gserviceaccount.com",
        network="host/nodes",
        subnets=("central",),
        ssh_proxy="ssh -W %h:%p bastion",
    )
    assert not job.network.reaches("gcp", "us-east4")


def test_a_network_without_named_subnets_covers_every_region(load):
    job = load("network: {gcp: {network: nodes}}\n")
    assert job.network.reaches("gcp", "us-east4")
    assert job.named("gcp", "us-east4") == Named(network="nodes")


def test_named_resources_survive_the_ledger(load):
    for text in (AWS, GCP):
        job = load(text)
        assert Job.model_validate(job.model_dump(mode="json")) == job


@pytest.mark.parametrize(
    ("text", "field", "words"),
    [
        (AWS.replace("vpc: vpc-1, ", ""), "network.aws.us-east-1.vpc", "is missing"),
        (AWS.replace("vpc:", "vcp:"), "network.aws.us-east-1.vcp", "did you mean vpc"),
        (AWS.replace("us-east-1: {vpc", "everywhere: {vpc"), "network.aws", "write it by region, like us-east-1"),
        (GCP.replace("us-central1:", "central:"), "network.gcp.subnets", "write it by region, like us-central1"),
        (GCP.replace(".iam.gserviceaccount.com", ""), "identity.gcp", "NAME@PROJECT.iam.gserviceaccount.com"),
        (GCP.replace("-W %h:%p", "-W node:22"), "network.gcp.ssh_proxy", "ProxyCommand with %h"),
        (GCP.replace("ssh -W %h:%p bastion", '"ssh -W %h:%p # x"'), "network.gcp.ssh_proxy", "write it into a script"),
        (GCP.replace("host/nodes", "spotrl-nodes"), "network.gcp.network", "that spotrl makes and deletes"),
        ("identity: {aws: spotrl-node}\n", "identity.aws", "that spotrl makes and deletes"),
        (
            AWS + "resources: {trainer: {infra: aws/us-west-2}}\n",
            "resources.trainer.infra",
            "network.aws is in us-east-1",
        ),
    ],
)
def test_invalid_named_resources_are_refused_with_field_and_remedy(load, text, field, words):
    with pytest.raises(JobError, match=words) as caught:
        load(text)
    assert caught.value.field == field
    assert caught.value.line >= 2


def test_this_computers_address_counts_only_if_ssh_comes_from_it(load):
    assert load("").network.is_reached_from_here(["aws", "gcp"])
    private, proxied = load(AWS).network, load(GCP).network
    assert not private.is_reached_from_here(["aws"])
    assert private.is_reached_from_here(["aws", "gcp"])
    assert not proxied.is_reached_from_here(["gcp"])
    assert load("network: {gcp: {network: nodes}}\n").network.is_reached_from_here(["gcp"])


H100 = (
    "model: {name: qwen-image, path: model, weights: lora}\n"
    "resources: {trainer: {accelerators: H100:8}, rollout: {accelerators: H100:8, num_nodes: 2}}\n"
)


def test_a_plan_uses_only_regions_of_the_network(load, tmp_path):
    sessions, now_ms = open_ledger(tmp_path / "ledger.sqlite"), 1_795_348_800_000
    catalog = current_catalog(tmp_path / "catalogs")

    def regions(text, clouds=CLOUDS, **more):
        plan = cloud_plan(sessions, resolve(load(text + H100, clouds)), catalog, now_ms, **more).as_plan()
        return {site.region for site in plan.sites if site.cloud == "aws" and site.trainer}

    assert "us-east-1" in regions("")
    assert len(regions("")) > 1
    assert regions("", closed={("aws", "us-east-1"): "a policy"}) == regions("") - {"us-east-1"}, (
        "an organisation forbids it"
    )
    assert regions(AWS) == {"us-east-1"}
    with pytest.raises(PlacementError, match="the job's network is in aws me-south-9, so no other region counts"):
        regions(AWS.replace("us-east-1", "me-south-9"), "infra: aws\n")
