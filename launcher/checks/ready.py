"""Checks before the first purchase on a real cloud: find every fault that would otherwise appear on a billed node.

the job (limits, buckets, too long names) -> this machine (programs, SkyPilot, secrets) -> too old prices
-> credentials -> buckets, with a real write -> another run of the same name: its machines, its lease, its checkpoints

Nothing is bought, and nothing is left behind. A fault raises one Failure with the remedy.
"""

import secrets
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path

from engine.config import SHIPPED
from engine.model_parts import weight_files
from engine.trainer_ranks import ranks_of
from launcher.checks.gcloud import GcloudMissing, check_gcloud
from launcher.checks.preflight import check_disk, check_secrets, check_sinks
from launcher.clouds.base import CallerIdentity, CloudApi, CloudRefused, InstanceState, refuse_wrong, wrong_of
from launcher.exit_codes import Failure
from launcher.job.checked import CheckedJob, JobError
from launcher.job.schema import Job
from launcher.market.offers import TOO_OLD, CatalogError, age_of, age_text
from launcher.market.refusals import POLICY_WORDS
from launcher.money import hourly
from launcher.placement.plan import Slot
from launcher.settings import runs_folder
from launcher.storage.store_lease import StoreLease
from launcher.storage.stores import check_no_checkpoint, check_writable, open_store, run_store

NODE_NAME_LIMIT = 35
"""Longest cluster name that SkyPilot and every cloud accept."""

GENERATIONS = 99
"""Highest generation number that the check of name lengths assumes. The name of a node ends in its generation."""

PROGRAMS = ("ssh", "rsync")

CLOSED = "a policy of the organisation forbids it"

AT_ONCE = 16
"""Largest number of queries to clouds at the same time."""


def check_job(checked: CheckedJob, slots: Sequence[Slot]) -> None:
    """Check the job without network calls. Raises JobError."""
    for problem in job_problems(checked, slots):
        raise problem


def job_problems(checked: CheckedJob, slots: Sequence[Slot]) -> Iterator[JobError]:
    """Yield everything in the job that a real cloud refuses, found without network calls."""
    job = checked.job
    for field, flag in (("max_total", "--max-total 200"), ("max_hourly", "--max-hourly 15")):
        if getattr(job.budget, field) is None:
            yield checked.error(
                f"budget.{field}",
                f"budget.{field} is not set, and a run on a real cloud ({job.infra}) needs it",
                f"say what it may cost at most, like {flag}",
            )
    without = [cloud for cloud in job.clouds if cloud not in job.store]
    if without:
        example = {"aws": "s3://my-bucket/spotrl", "gcp": "gs://my-bucket/spotrl"}
        buckets = ", ".join(f"{cloud}: {example[cloud]}" for cloud in without)
        yield checked.error(
            "store",
            f"store has no bucket on {' and '.join(without)}, where nodes may be bought (infra {job.infra}); "
            "what only a node has is lost with it",
            f"name a bucket of yours, like `store: {{{buckets}}}`, or leave {' and '.join(without)} out of infra",
        )
    longest = max((f"{job.name}-{slot.name}-g{GENERATIONS}" for slot in slots), key=len)
    if len(longest) > NODE_NAME_LIMIT:
        fits = len(job.name) - (len(longest) - NODE_NAME_LIMIT)
        yield checked.error(
            "name",
            f"name is {job.name}, which makes nodes like {longest}; {NODE_NAME_LIMIT} characters fit",
            f"use a name of up to {fits} characters (--name)",
        )
    if job.model.path is not None and (problem := _model_problem(checked, checked.workdir / job.model.path)):
        yield problem


def _model_problem(checked: CheckedJob, folder: Path) -> JobError | None:
    """Return why the job's model folder cannot be sent from this machine, or None."""
    job = checked.job
    if not folder.is_dir():
        return checked.error(
            "model.path",
            f"model.path is {job.model.path}, and there is no such folder here: from here it is sent to the bucket, "
            "where nodes take it from",
            f"bring it here first, like `hf download OWNER/MODEL --local-dir {job.model.path}`",
        )
    pattern = "*.safetensors" if job.model.name in SHIPPED else "model_index.json"
    if not any(folder.glob(pattern)):
        return checked.error(
            "model.path",
            f"model.path is {job.model.path}, a folder without {pattern}: no node could load {job.model.name} from it",
            "give the folder that the model was saved in",
        )
    divides = job.model.name not in SHIPPED and job.model.weights == "full" and ranks_of(job) > 1
    if divides and not all(name.endswith((".safetensors", ".json")) for name in weight_files(folder, "transformer")):
        return checked.error(
            "model.path",
            f"model.path is {job.model.path}, whose transformer is not in safetensors: ranks that divide full weights "
            "read their own part of a file, and a pickled file cannot be read in parts",
            "download the model as safetensors, or set runtime.trainer_ranks to 1",
        )
    return None


def check_here(checked: CheckedJob, environ: Mapping[str, str]) -> None:
    """Check this machine's programs, disk and secrets. Raises Failure."""
    missing = [program for program in PROGRAMS if shutil.which(program) is None]
    if missing:
        raise Failure(
            f"{' and '.join(missing)} cannot be found here, and nodes are reached with it; install it (Debian: "
            "`apt-get install openssh-client rsync`)"
        )
    if find_spec("sky") is None:
        raise Failure(
            "SkyPilot is not installed here, and it is what buys nodes; `pip install 'spotrl[sky]'`, then try again"
        )
    if "gcp" in checked.job.clouds:
        _check_gcloud(checked.job.clouds, environ)
    check_disk(runs_folder())
    check_secrets(checked, environ)
    check_sinks(checked)


def _check_gcloud(clouds: Sequence[str], environ: Mapping[str, str]) -> None:
    """Refuse a launch that SkyPilot would refuse on Google Cloud, and name the clouds that remain possible."""
    try:
        check_gcloud(environ, Path.cwd())
    except GcloudMissing as missing:
        other_clouds = ",".join(cloud for cloud in clouds if cloud != "gcp")
        without = f". Only Google Cloud lacks it: `--infra {other_clouds}` launches without" if other_clouds else ""
        raise GcloudMissing(f"{missing}{without}") from None


def check_prices(slots: Sequence[Slot], now_ms: int) -> None:
    """Check that the plan's prices are recent enough to buy. Raises CatalogError."""
    for slot in slots:
        place = slot.placement
        if age_of(place.price_observed_at, place.market, now_ms) in TOO_OLD:
            raise CatalogError(
                f"the {place.market.value} price of {place.cloud} {place.instance_type} in {place.zone} "
                f"({hourly(place.micro_usd_per_hour)}, {place.price_source}) is "
                f"{age_text(place.price_observed_at, now_ms)}: too old to buy by; `spotrl catalog refresh`, or "
                "--allow-old-prices if you know what it costs"
            )


def _check_unused(url: str, run: str) -> None:
    """Check that no other machine controls a run of this name, and that none left checkpoints. Raises Failure."""
    StoreLease(lambda: open_store(url), run, holder=secrets.token_hex(8)).check_free()
    check_no_checkpoint(url)


def check_clouds(
    checked: CheckedJob,
    apis: Mapping[str, CloudApi],
    regions: Iterable[tuple[str, str]],
    try_bucket: Callable[[str], None] = check_writable,
    unused: Callable[[str, str], None] = _check_unused,
) -> dict[str, CallerIdentity]:
    """Check the credentials, that the run's buckets are writable, and that no other run uses the run's name.

    Returns the identity of the credentials by cloud. `regions`: every candidate (cloud, region) of the run.
    Live instances of a run of this name are reported first, then its lease or checkpoints in a bucket. Raises Failure.
    """
    buckets = [run_store(checked.job.store, cloud, checked.job.name) for cloud in apis]
    with ThreadPoolExecutor(max_workers=AT_ONCE) as pool:
        callers = {cloud: pool.submit(api.caller) for cloud, api in apis.items()}
        tried = [pool.submit(try_bucket, url) for url in buckets]
        identities = {cloud: caller.result() for cloud, caller in callers.items()}
        for _ in pool.map(lambda api: api.check_launches(), apis.values()):
            pass
        for trial in tried:
            trial.result()
        for _ in pool.map(lambda place: _check_name_is_free(checked, apis[place[0]], place[1]), regions):
            pass
        for _ in pool.map(lambda url: unused(url, checked.job.name), buckets):
            pass
    return identities


def closed_regions(apis: Mapping[str, CloudApi], regions: Iterable[tuple[str, str]]) -> dict[tuple[str, str], str]:
    """Return the (cloud, region) in which no node may be bought, with the reason as text.

    A policy of the organisation refuses even to list instances there, or SkyPilot can launch nothing in the cloud.
    Other errors are left to `check_clouds`.
    """

    def reason_of(place: tuple[str, str]) -> str:
        cloud, region = place
        if cloud in no_launch:
            return no_launch[cloud]
        try:
            apis[cloud].instances(region)
        except CloudRefused as refused:
            return CLOSED if any(word in str(refused) for word in POLICY_WORDS) else ""
        except Failure:
            pass
        return ""

    no_launch = {cloud: reason for cloud, api in apis.items() if (reason := _no_launch(api))}
    places = sorted(set(regions))
    with ThreadPoolExecutor(max_workers=AT_ONCE) as pool:
        return {place: reason for place, reason in zip(places, pool.map(reason_of, places), strict=True) if reason}


def _no_launch(api: CloudApi) -> str:
    try:
        api.check_launches()
    except CloudRefused as refused:
        return str(refused)
    except Failure:
        pass
    return ""


def check_named(
    job: Job, apis: Mapping[str, CloudApi], regions: Iterable[tuple[str, str]], ssh_from: Callable[[], str]
) -> None:
    """Check that nodes can use the identities and networks that the job names. Raises CloudRefused.

    Raises only if no candidate region has a suitable network: the run buys its nodes in a region with a suitable
    network.
    """
    for cloud, api in apis.items():
        refuse_wrong(api.check_identity(job.named_on(cloud)))
    named = [(cloud, region) for cloud, region in sorted(regions) if job.named(cloud, region).network]
    source = ssh_from() if named else ""
    with ThreadPoolExecutor(max_workers=AT_ONCE) as pool:
        looks = list(pool.map(lambda at: apis[at[0]].check_network(at[1], job.named(*at), source), named))
    if looks and all(wrong_of(findings) for findings in looks):
        refuse_wrong(looks[0])


def _check_name_is_free(checked: CheckedJob, api: CloudApi, region: str) -> None:
    """Raise JobError if the region has live VMs labelled with this run name.

    The VMs belong to a run in another ledger, because this ledger has no run of the name.
    """
    name = checked.job.name
    alive = [instance for instance in api.instances(region, run=name) if instance.state is not InstanceState.GONE]
    if alive:
        whose = ", ".join(f"{instance.id} of {instance.owner or 'somebody'}" for instance in alive)
        raise checked.error(
            "name",
            f"machines of a run called {name} are in {api.cloud} {region} already, and no run here is: {whose}",
            f"give this one another name (--name {name}-2); if nobody wants those any more: spotrl reap",
        )
