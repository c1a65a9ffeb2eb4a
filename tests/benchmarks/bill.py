"""bill: how long does `spotrl bill import` take for a company's month of 5 million rows, and how much memory?

    python -m tests.benchmarks.bill --json              5 million rows
    python -m tests.benchmarks.bill --rows 100000 --json

A month with all columns is made: AWS's as CSV in gzip and Google Cloud's as parquet, and both in both forms with a
tenth of the rows. One row in a hundred is about the nodes of one run; the rest are of strangers in other accounts. Each
import is a process of its own into a new ledger. The import of the last file is repeated into the same ledger.
"""

import argparse
import json
import multiprocessing
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from launcher.ledger.models import Node
from launcher.ledger.store import open_ledger, writing
from tests.benchmarks.page import load_now, publish
from tests.fakes.bills import AWS_COLUMNS, BILLING_ACCOUNT, PAYER
from tests.launcher.made_ledger import HOUR_MS, JOB, a_run

ROWS, OURS = 5_000_000, 100
"""Rows of a file; one row in so many is ours."""

NODES, HOURS = 50, 600
RUN, ACCOUNT, PROJECT = "bench", "123456789012", "my-project"

TEXT = """
## What the figures are

One row in a hundred is about the nodes of one run, and goes into the ledger; the rest is read and left. `seconds` is
the time by the clock on a computer that other work shared, `processor` what the import itself took. `peak MB` is the
most memory of the process, with Python and the ledger's libraries. CSV is read by Python, parquet by DuckDB with at
most 256 MB. Our rows wait in a temporary file, so memory does not grow with the rows. A file with our rows alone took
86 MB with 30,000 and with 240,000 rows, and 66 us of the processor for each.
"""


def make_home(folder: Path) -> None:
    """Make a ledger with one run of `NODES` nodes on each cloud, which ran for `HOURS` hours."""
    folder.mkdir()
    sessions = open_ledger(folder / "ledger.sqlite")
    with writing(sessions) as session:
        made = a_run(session, RUN, job={**JOB, "iterations": 10}, factor=1.0)
        made.run.infra, made.run.money_basis = "aws,gcp", "metered"
        for number in range(2 * NODES):
            node: Node = made.node(f"spot-{number}", up=0, end=HOURS * HOUR_MS)
            node.cloud = "aws" if number < NODES else "gcp"
        made.status("finished", HOURS * HOUR_MS, "target")


FORMS = {"aws parquet": "aws", "aws csv.gz": "aws", "gcp parquet": "gcp", "gcp csv.gz": "gcp"}
LARGE = ("aws csv.gz", "gcp parquet")
"""Files that are made with all rows: one of each cloud, and of each form. All four are made with a tenth of them."""


def make_files(folder: Path, rows: int, wanted: Sequence[str] = tuple(FORMS)) -> dict[str, Path]:
    """Write the month of each cloud in the wanted forms."""
    import duckdb  # not in the process that measures

    files = {}
    with duckdb.connect() as connection:
        connection.execute(f"SET memory_limit = '2GB'; SET temp_directory = '{folder}'")
        for cloud, query in (("aws", aws_query(rows)), ("gcp", gcp_query(rows))):
            parquet, text = folder / f"{cloud}.parquet", folder / f"{cloud}.csv.gz"
            connection.execute(f"COPY ({query}) TO '{parquet}' (FORMAT parquet)")
            files[f"{cloud} parquet"] = parquet
            if f"{cloud} csv.gz" not in wanted:
                continue
            nested = {"aws": ("resource_tags", "product"), "gcp": GCP_NESTED}[cloud]
            as_json = ", ".join(f"CAST(to_json({name}) AS VARCHAR) AS {name}" for name in nested)
            times = (
                ""
                if cloud == "aws"
                else ", " + ", ".join(f"strftime({name}, '%Y-%m-%d %H:%M:%S UTC') AS {name}" for name in GCP_TIMES)
            )
            connection.execute(
                f"COPY (SELECT * REPLACE ({as_json}{times}) FROM read_parquet('{parquet}')) "
                f"TO '{text}' (FORMAT csv, HEADER, COMPRESSION gzip)"
            )
            files[f"{cloud} csv.gz"] = text
    return {name: file for name, file in files.items() if name in wanted}


IS_OURS = f"(i % {OURS} = 0)"
NUMBER = f"(i // {OURS}) % {NODES}"
HOUR = f"TIMESTAMP '2025-01-15 08:00:00' + INTERVAL 1 HOUR * ((i // {OURS * NODES}) % {HOURS})"


def either(ours: str, theirs: str) -> str:
    """Return SQL that is the first for our rows and the second for all others."""
    return f"CASE WHEN {IS_OURS} THEN {ours} ELSE {theirs} END"


def aws_query(rows: int) -> str:
    """Return a query of a CUR 2.0 with all columns."""
    usage = "'USW2-SpotUsage:g6.xlarge'"
    filled = {
        "bill_payer_account_id": f"'{PAYER}'",
        "bill_billing_entity": "'AWS'",
        "bill_bill_type": "'Anniversary'",
        "bill_billing_period_start_date": "TIMESTAMP '2025-01-01 00:00:00'",
        "bill_billing_period_end_date": "TIMESTAMP '2025-02-01 00:00:00'",
        "identity_line_item_id": "md5(i::VARCHAR) || substr(md5((i + 1)::VARCHAR), 1, 20)",
        "identity_time_interval": f"strftime({HOUR}, '%Y-%m-%dT%H:00:00Z/PT1H')",
        "line_item_availability_zone": "'us-west-2a'",
        "line_item_currency_code": "'USD'",
        "line_item_legal_entity": "'Amazon Web Services, Inc.'",
        "line_item_line_item_description": "'g6.xlarge Linux/UNIX Spot Instance-hour in US West (Oregon)'",
        "line_item_line_item_type": f"CASE i % {OURS} WHEN 1 THEN 'Tax' WHEN 2 THEN 'Credit' ELSE 'Usage' END",
        "line_item_operation": "'RunInstances:SV001'",
        "line_item_product_code": "'AmazonEC2'",
        "line_item_resource_id": either(f"'i-{RUN}' || {NUMBER}", "'i-' || substr(md5((i % 50000)::VARCHAR), 1, 17)"),
        "line_item_unblended_cost": "(i % 9973) / 9973.0::DOUBLE",
        "line_item_blended_cost": "(i % 9973) / 9973.0::DOUBLE",
        "line_item_usage_account_id": either(f"'{ACCOUNT}'", "(200000000000 + i % 40)::VARCHAR"),
        "line_item_usage_amount": "1.0::DOUBLE",
        "line_item_usage_start_date": HOUR,
        "line_item_usage_end_date": f"{HOUR} + INTERVAL 1 HOUR",
        "line_item_usage_type": usage,
        "pricing_unit": "'Hrs'",
        "product": "MAP {'product_name': 'Amazon Elastic Compute Cloud', 'region': 'us-west-2'}",
        "product_instance_type": "'g6.xlarge'",
        "product_region_code": "'us-west-2'",
        "product_servicecode": "'AmazonEC2'",
        "product_usagetype": usage,
        "resource_tags": either(
            f"MAP {{'user_spotrl_run': '{RUN}', 'user_spotrl_node': '{RUN}-spot-' || {NUMBER} || '-g1'}}",
            "MAP {'user_team': 'team-' || (i % 30), 'user_env': 'prod'}",
        ),
    }
    columns = ", ".join(f"{filled.get(name, 'NULL::VARCHAR')} AS {name}" for name in AWS_COLUMNS)
    return f"SELECT {columns} FROM range({rows}) r(i)"


GCP_NESTED = (
    *("service", "sku", "project", "labels", "system_labels", "location", "resource", "price", "usage", "credits"),
    "invoice",
)
GCP_TIMES = ("usage_start_time", "usage_end_time", "export_time")


def gcp_query(rows: int) -> str:
    """Return a query of a detailed usage cost."""
    name = either(f"'sky-{RUN}-' || {NUMBER}", "'vm-' || (i % 50000)")
    node = f"'{RUN}-spot-' || ({NODES} + {NUMBER}) || '-g1'"
    project = either(f"'{PROJECT}'", "'project-' || (i % 40)")
    labels = f"[{{'key': 'spotrl-run', 'value': '{RUN}'}}, {{'key': 'spotrl-node', 'value': {node}}}]"
    instances = "//compute.googleapis.com/projects/123/zones/us-central1-a/instances/"
    discount = "[{'name': 'sud', 'type': 'SUSTAINED_USAGE_DISCOUNT', 'amount': -0.01}]"
    sku = "Nvidia L4 GPU attached to Spot Preemptible VMs running in Americas"
    filled = {
        "billing_account_id": f"'{BILLING_ACCOUNT}'",
        "service": "{'id': '6F81-5844-456A', 'description': 'Compute Engine'}",
        "sku": f"{{'id': 'D973-5D65-BAB2', 'description': '{sku}'}}",
        "usage_start_time": f"({HOUR})::TIMESTAMPTZ",
        "usage_end_time": f"({HOUR} + INTERVAL 1 HOUR)::TIMESTAMPTZ",
        "project": f"{{'id': {project}, 'number': '123', 'name': 'p'}}",
        "labels": either(labels, "[{'key': 'team', 'value': 'team-' || (i % 30)}]"),
        "system_labels": "[{'key': 'compute.googleapis.com/machine_spec', 'value': 'g2-standard-4'}]",
        "location": "{'location': 'us-central1-a', 'country': 'US', 'region': 'us-central1', 'zone': 'us-central1-a'}",
        "resource": f"{{'name': {name}, 'global_name': '{instances}' || (i % 50000)}}",
        "price": "{'effective_price': 0.22, 'unit': 'hour'}",
        "export_time": "TIMESTAMPTZ '2025-02-03 04:05:06+00'",
        "cost": "(i % 9973) / 9973.0::DOUBLE",
        "currency": "'USD'",
        "currency_conversion_rate": "1.0::DOUBLE",
        "usage": "{'amount': 3600.0, 'unit': 'seconds', 'amount_in_pricing_units': 1.0}",
        "credits": f"CASE WHEN i % {3 * OURS} = 0 THEN {discount} ELSE [] END",
        "invoice": "{'month': '202501', 'publisher_type': 'GOOGLE'}",
        "cost_type": "'regular'",
        "transaction_type": "'GOOGLE'",
        "seller_name": "'Google'",
    }
    return f"SELECT {', '.join(f'{value} AS {name}' for name, value in filled.items())} FROM range({rows}) r(i)"


def measure(home: Path, file: Path) -> dict[str, Any]:
    """Import a file in a process of its own. Return its seconds, processor seconds, peak memory and counts."""
    began = time.monotonic()
    with tempfile.TemporaryFile() as out:
        process = subprocess.Popen(
            [sys.executable, "-m", "launcher.cli.main", "bill", "import", str(file), "--json"],
            env={**os.environ, "SPOTRL_HOME": str(home)},
            stdout=out,
        )
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        out.seek(0)
        found = json.loads(out.read())
    if process.returncode:
        raise RuntimeError(f"the import of {file.name} failed: {found}")
    return {
        "rows": found["rows"],
        "our_rows": found["our_rows"],
        "added": found["added"],
        "known": found["known"],
        "seconds": round(time.monotonic() - began, 1),
        "cpu_s": round(used.ru_utime + used.ru_stime, 1),
        "peak_mb": round(used.ru_maxrss / 1024),
        "file_mb": round(file.stat().st_size / 1e6, 1),
    }


def measured(folder: Path, rows: int, wanted: Sequence[str] = tuple(FORMS)) -> dict[str, dict[str, Any]]:
    """Return the figures of each file of this many rows."""
    work = folder / str(rows)
    work.mkdir()
    found: dict[str, dict[str, Any]] = {}
    # The peak memory of a process is at least that of the process that starts it, so another one makes the files.
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as maker:
        files = maker.submit(make_files, work, rows, wanted).result()
    for number, (name, file) in enumerate(files.items()):
        home = work / f"home-{number}"
        make_home(home)
        found[name] = measure(home, file)
    if wanted == tuple(FORMS):
        found[f"{name}, again"] = measure(home, file)
        assert found[f"{name}, again"]["added"] == 0
    shutil.rmtree(work)
    return found


def _row(name: str, figures: Mapping[str, Any]) -> dict[str, Any]:
    shown = {"file": name, "rows": f"{figures['rows']:,}", "ours": f"{figures['our_rows']:,}", "MB": figures["file_mb"]}
    return shown | {"seconds": figures["seconds"], "processor": figures["cpu_s"], "peak MB": figures["peak_mb"]}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--rows", type=int, default=ROWS)
    arguments = parser.parse_args()
    load = load_now()
    folder = Path(tempfile.mkdtemp(prefix="spotrl-bill-"))
    try:
        small = measured(folder, max(1000, arguments.rows // 10))
        large = measured(folder, arguments.rows, LARGE)
    finally:
        shutil.rmtree(folder)
    largest = max(large.values(), key=lambda figures: figures["seconds"])
    publish(
        "bill",
        question="how long does the import of a month of 5 million rows take, and how much memory?",
        command="python -m tests.benchmarks.bill --json",
        result={
            "rows": arguments.rows,
            "seconds": largest["seconds"],
            "peak_mb": max(figures["peak_mb"] for figures in large.values()),
            "peak_mb_of_a_tenth": max(figures["peak_mb"] for figures in small.values()),
            "files": large,
            "small": small,
        },
        runs=1,
        seeds=[],
        load1=load,
        rows=[
            *(_row(name, figures) for name, figures in large.items()),
            *(_row(f"{name} (a tenth)", figures) for name, figures in small.items()),
        ],
        text=TEXT,
    )


if __name__ == "__main__":
    main()
