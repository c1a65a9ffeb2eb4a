"""Build the parts that manage a run on real clouds: the cloud APIs, the owner's identity, the provisioner.

The only module that chooses implementations for the protocols. The module makes no decisions and does not wait for
nodes.
The common facts of a run's nodes (bundle, owners) are made once and kept in the run's folder. So a controller that
starts during a cloud outage, or after an upgrade of spotrl, continues with the same facts.
"""

import json
import logging
import os
import shutil
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from ipaddress import AddressValueError, IPv4Address
from pathlib import Path
from typing import Any, Literal

import httpx

from engine.clock import Clock
from engine.durable import write_durably
from engine.lora_file import files_of, find_lora
from launcher.clouds.base import CloudApi
from launcher.clouds.build import build_cloud_api
from launcher.exit_codes import Failure
from launcher.job.schema import Job
from launcher.ledger.models import Run
from launcher.placement.plan import sites_from
from launcher.provision.local.preemptions import preemption_schedule
from launcher.provision.local.provisioner import LocalProvisioner
from launcher.provision.provisioner import Provisioner
from launcher.provision.sky.bundle import Bundle, make_bundle
from launcher.provision.sky.node_link import NodeLink
from launcher.provision.sky.sky import Sky
from launcher.provision.sky.sky_provisioner import SkyProvisioner
from launcher.provision.sky.surroundings import Purchases
from launcher.storage.stores import run_store
from launcher.storage.weights import digest_of, send, weights_of

log = logging.getLogger(__name__)

CHECK_IP_URL = "https://checkip.amazonaws.com"
"""A service that returns the caller's public address as text. `SPOTRL_CHECK_IP_URL` names another service."""

BLOCKING_CALLS = 16
"""Most parallel calls to clouds and SkyPilot: one for each node and region of a small run."""


def cloud_apis(clouds: Iterable[str]) -> dict[str, CloudApi]:
    """Return the API of each cloud, with this user's credentials. No call is made yet."""
    return {cloud: build_cloud_api(cloud) for cloud in clouds}


def controller_address() -> str:
    """Return this machine's public IPv4 address. Raises Failure if the service gives none.

    A captive portal answers with a page, and an IPv6 address fits in no rule of a node's network.
    """
    url = os.environ.get("SPOTRL_CHECK_IP_URL", CHECK_IP_URL)
    try:
        answer = httpx.get(url, timeout=10.0)
        answer.raise_for_status()
        return str(IPv4Address(answer.text.strip()))
    except AddressValueError:
        trouble = f"its answer is no IPv4 address: {answer.text[:60]!r}"
    except httpx.HTTPError as error:
        trouble = str(error)
    raise Failure(
        f"{url} did not say which address this machine is seen at ({trouble}); name it: --set ssh_from=203.0.113.7/32"
    )


def ssh_from(job: Job) -> str:
    """Return the addresses that may reach nodes by SSH, as CIDR.

    Empty if the job names a network on every cloud: then the rules of these networks decide.
    """
    if job.ssh_from is not None or not job.network.is_reached_from_here(job.clouds):
        return job.ssh_from or ""
    return f"{controller_address()}/32"


def provisioner_of(run: Run, job: Job, clock: Clock, check_lease: Callable[[], None] = lambda: None) -> Provisioner:
    """Make the provisioner of a run. `check_lease` raises LeaseLost when another controller took over."""
    folder = Path(run.folder)
    if not job.clouds:
        return LocalProvisioner(folder, clock, preemption_schedule(job.preemptions))
    apis = cloud_apis(job.clouds)
    common = prepare_folder(folder, job, apis, None if run.workdir is None else Path(run.workdir))
    secrets = {name: os.environ[name] for name in job.secrets if name in os.environ}
    purchases = Purchases(
        run=run.name,
        owners=common["owners"],
        folder=folder,
        ssh_from=common["ssh_from"],
        buckets=[run_store(job.store, cloud, run.name) for cloud in job.clouds],
        bundle=Bundle(folder=folder / "bundles" / common["bundle"], digest=common["bundle"]),
        weights=_weights(job, common),
        lora=_weights(job, common, "lora"),
        regions=sorted({site.place for site in sites_from(run.plan)}),
        images=job.image,
        named=job.named,
        keep_failed_ms=job.recovery.keep_failed or 0,
    )
    return SkyProvisioner(
        purchases,
        sky=Sky(),
        clouds=apis,
        clock=clock,
        link=partial(NodeLink, secrets=secrets),
        pool=ThreadPoolExecutor(max_workers=BLOCKING_CALLS, thread_name_prefix="cloud"),
        check_lease=check_lease,
        find_ssh_from=partial(ssh_from, job),
    )


def prepare_folder(
    folder: Path,
    job: Job,
    apis: Mapping[str, CloudApi],
    workdir: Path | None,
    say: Callable[[str], None] = log.info,
) -> dict[str, Any]:
    """Return the common facts of a run's nodes, made once and then read from the run's folder.

    Only this machine's address is fetched again, because a laptop moves. Raises Failure if a cloud does not accept the
    credentials, or if the job's folder or the model's weights cannot be sent. `launch` calls the function before a
    purchase.
    """
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    file = folder / "common.json"
    common = _read_common(file)
    try:
        address = ssh_from(job)
    except Failure as error:
        if not common:
            raise
        log.warning("%s; nodes go on being reached from %s", error, common["ssh_from"])
        address = common["ssh_from"]
    if not common:
        callers = {cloud: api.caller() for cloud, api in apis.items()}
        model = None if job.model.path is None else (workdir or Path()) / job.model.path
        lora = files_of(find_lora((workdir or Path()) / job.model.lora)) if job.model.lora is not None else []
        common = {
            "owners": {cloud: caller.owner for cloud, caller in callers.items()},
            "accounts": {cloud: caller.account for cloud, caller in callers.items()},
            "bundle": make_bundle(folder / "bundles", workdir, sent=[path for path in (model, *lora) if path]).digest,
        }
        if lora:
            alone = folder / "lora"
            alone.mkdir(exist_ok=True)
            for file in lora:
                shutil.copyfile(file, alone / file.name)
            common["lora"] = digest_of(alone)
            for url in _weights(job, common, "lora").values():
                send(alone, url, say)
        if model is not None:
            say(f"Reading {model}: what it holds names it in the bucket.")
            common["weights"] = digest_of(model)
            for url in _weights(job, common).values():
                send(model, url, say)
    common["ssh_from"] = address
    write_durably(file, json.dumps(common).encode())
    return common


def _read_common(file: Path) -> dict[str, Any]:
    """Return the recorded facts; empty if the file is missing or damaged by a power cut."""
    try:
        return dict(json.loads(file.read_text()))
    except FileNotFoundError:
        return {}
    except (ValueError, TypeError):
        log.warning("%s cannot be read: what it said is asked for and made again", file)
        return {}


def _weights(job: Job, common: Mapping[str, Any], key: Literal["weights", "lora"] = "weights") -> dict[str, str]:
    """Return the URL of the model, or of the job's LoRA, by cloud; empty if nodes need none."""
    digest = common.get(key)
    return {} if digest is None else {cloud: weights_of(job.store[cloud], digest) for cloud in job.clouds}
