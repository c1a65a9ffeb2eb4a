"""The controller's process: take the leases, repeat passes until the run is over, survive errors."""

import os
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.orm import Session, sessionmaker

from engine.clock import Clock, SteadyClock, boot_ms
from launcher.clouds.limits import build_limits
from launcher.controller.bucket_sizes import BucketSizes, Count, count_now
from launcher.controller.cloud_time import CloudTime
from launcher.controller.controller import Controller, log
from launcher.controller.lease import this_ledger, was_elsewhere
from launcher.controller.price_watch import watch_prices
from launcher.decide.run_budget import (
    describe_limits,
)
from launcher.exit_codes import Failure
from launcher.job.schema import Job
from launcher.ledger.models import ControllerLease, Run
from launcher.ledger.store import (
    find_run,
    newest_ms,
)
from launcher.notifications.notifier import Notifier
from launcher.notifications.webhook import url_problem
from launcher.provision.provide import provisioner_of
from launcher.provision.provisioner import Provisioner
from launcher.sinks.shipper import end_shippers, start_shippers
from launcher.storage.store_lease import LeaseLost, StoreLease
from launcher.storage.stores import open_store, run_store

PASS_SECONDS, CLOUD_PASS_SECONDS = 0.25, 0.5
"""Wall time between passes, on the local infra and on clouds. Short enough that a pass sees a preemption notice well
before the engine's leases expire."""

LONGEST_PAUSE_SECONDS = 60.0
"""Longest pause after a failed pass. A locked ledger or a full disk makes passes fail, and the pause doubles up to this
limit. The controller never gives up, because nodes are paid for. Spend deadlines finally end the nodes."""


LONGEST_GUARD_SECONDS = 10.0
"""Longest pause after a pass with a bug of spotrl in it. Limits, stops and releases work in such passes, and a release
takes several of them."""


def run_controller(
    sessions: sessionmaker[Session],
    run_name: str,
    *,
    provisioner: Provisioner | None = None,
    clock: Clock | None = None,
    sleep: Callable[[float], None] = time.sleep,
    count: Count = count_now,
) -> None:
    """Manage a run until the run is over and nothing of the run is left.

    `count`: returns the sizes of folders in buckets.

    Raises LeaseHeld if another controller is active.
    """
    with sessions() as session:
        run = find_run(session, run_name)
        is_moved = was_elsewhere(session.get(ControllerLease, run.id))
        ledger = Path(str(session.get_bind().engine.url.database))
    job = Job.model_validate(run.job)
    cloud_time = CloudTime({cloud: build_limits(cloud) for cloud in job.clouds}) if job.clouds else None
    clock = clock or _clock_of(sessions, run, cloud_time)
    bucket_lease = _store_lease(run, job, ledger)
    if bucket_lease is not None:
        if is_moved:
            bucket_lease.check_free()  # a bucket that does not answer proves nothing, and the first machine may go on
        bucket_lease.take()
    if provisioner is None:
        check_lease = bucket_lease.check if bucket_lease is not None else lambda: None
        provisioner = provisioner_of(run, job, clock, check_lease)
    controller = Controller(sessions, run, provisioner, clock, bucket_lease=bucket_lease, cloud_time=cloud_time)
    if bucket_lease is not None:
        bucket_lease.keep()
    log.info(
        "controller of %s, process %s: %s", run.name, os.getpid(), describe_limits(controller.wanted, controller.sites)
    )
    ended = threading.Event()
    if cloud_time is not None:
        cloud_time.ask(clock)
        cloud_time.keep(clock, ended)
    if controller.sites:
        threading.Thread(target=watch_prices, args=(sessions, run, job, ended), name="prices", daemon=True).start()
    notifier = _notifier(sessions, run, job, clock)
    shippers = start_shippers(sessions, run, job.logging, clock)
    sizes = BucketSizes(sessions, run, count)
    trouble, pass_seconds = 0, CLOUD_PASS_SECONDS if controller.sites else PASS_SECONDS
    while True:
        started = time.monotonic()
        try:
            if controller.one_pass():
                break
            if controller.has_released:
                sizes.begin()
            trouble, longest_s = 0, pass_seconds
        except LeaseLost as error:
            log.warning("%s", error)
            provisioner.close()
            ended.set()
            return
        except Exception as error:
            # A bug in one decision must not end the process that guards the money.
            trouble += 1
            is_outage = isinstance(error, SQLAlchemyError | OSError | Failure)
            longest_s = LONGEST_PAUSE_SECONDS if is_outage else LONGEST_GUARD_SECONDS
            log.exception("this pass failed (%s in a row); trying again", trouble)
        pause = min(longest_s, pass_seconds * 2 ** min(trouble, 10))
        sleep(max(0.0, pause - (time.monotonic() - started)))
    ended.set()
    sizes.begin()
    if bucket_lease is not None:
        bucket_lease.give_up()
    controller.close()  # last: from now on no other process waits for this controller
    if notifier is not None:
        notifier.end()
    end_shippers(shippers)
    sizes.end()
    log.info("%s is over; nothing of it is left running", run.name)


def _notifier(sessions: sessionmaker[Session], run: Run, job: Job, clock: Clock) -> Notifier | None:
    """Start the messages to the job's webhook. None: the job has no webhook, or its URL is not in the environment."""
    name = job.notifications.webhook
    if name is None:
        return None
    url = os.environ.get(name, "")
    problem = url_problem(url) if url else "is not set"
    if problem:
        log.warning("no notices are sent: %s %s where the controller was started", name, problem)
        return None
    notifier = Notifier(sessions, run.name, clock, url, job.notifications.no_progress)
    notifier.start()
    return notifier


def _clock_of(sessions: sessionmaker[Session], run: Run, cloud_time: CloudTime | None) -> Clock:
    """Return the clock by which the controller meters spending.

    Nodes on the local infra share the run's clock file. On clouds the controller uses the clouds'
    time, and never a time before the newest time in the ledger: a slow clock would forget spending.
    """
    if cloud_time is None:
        if run.work_clock is None:
            return run.clock
        with sessions() as session:
            run.work_clock.begin(newest_ms(session, run))
        return run.work_clock
    cloud_time.ask()
    with sessions() as session:
        now_ms = max(cloud_time.now_ms(), newest_ms(session, run))
    return SteadyClock(origin_ms=run.clock_origin_ms, factor=run.clock_factor, began_ms=now_ms - boot_ms())


def _store_lease(run: Run, job: Job, ledger: Path) -> StoreLease | None:
    """Return the lease visible to controllers on other machines, in the bucket of the first cloud in the job.

    None: no bucket.
    """
    if not job.clouds or job.clouds[0] not in job.store:
        return None
    url = run_store(job.store, job.clouds[0], run.name)
    return StoreLease(partial(open_store, url), run.name, this_ledger(ledger))
