"""Dry runs of 200 random jobs, compared with the stored ones.

    python -m tests.golden.dry_runs            compare all of them; ends with exit code 1 and the differences
    python -m tests.golden.dry_runs --write    store what the product answers now

A change that only moves or renames code leaves every answer equal. A change of what the product does stores new
answers, and its commit says which and why. New keys of the JSON document count as equal until they are stored.
"""

import argparse
import gzip
import json
import multiprocessing
import os
import random
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any
from unittest.mock import patch

STORED = Path(__file__).with_name("dry_runs.json.gz")
SEED, JOBS = 20261129, 200
NOW_MS = 1_795_348_800_000
"""Time of all dry runs, because a plan depends on the age of prices."""

SMALL_GPUS = ("L4:1", "L40S:1", "L4:1", "H100:1")
LARGE_GPUS = ("A100-80GB:1", "A100-80GB:8", "H100:1", "H100:2", "H100:4", "H100:8", "H200:8")
SHIPPED = ("digits-ocr", "shapes")
VIDEO = ("wan", "hunyuan-video")


def random_job(rng: random.Random) -> dict[str, Any]:
    """Return a job. Some are refused: a refusal is an answer too."""
    is_local = rng.random() < 0.2
    name = rng.choice(SHIPPED if is_local else (*SHIPPED, "qwen-image", "qwen-image", "sd3", "flux", *VIDEO))
    gpus = SMALL_GPUS if name in SHIPPED else LARGE_GPUS
    gpu = rng.choice(gpus)
    job: dict[str, Any] = {
        "name": "golden",
        "infra": "local" if is_local else rng.choice(["aws", "gcp", "aws,gcp", "aws,gcp"]),
        "seed": rng.randrange(1000),
        "iterations": rng.choice([20, 40, 120]),
        "prompts": "shapes" if name == "shapes" else "digits",
        "model": {"name": name, "weights": rng.choice(["lora", "lora", "lora", "lora", "full"])},
        "reward": {"name": "shapes" if name == "shapes" else "ocr"} | ({"frames": 3} if name in VIDEO else {}),
        "algorithm": {
            "name": rng.choice(["auto", "flow-grpo", "flow-grpo", "grpo-guard", "diffusion-nft"]),
            "prompts_per_batch": rng.choice([16, 32, 48]),
            "images_per_prompt": rng.choice([4, 8, 16]),
        },
        "sampler": {"steps": rng.choice([8, 10, 20])},
        "resources": {
            "trainer": {"accelerators": gpu},
            "rollout": {"accelerators": rng.choice([gpu, rng.choice(gpus)])},
        },
        "budget": {"max_total": rng.choice([300, 30000, 300000])},
    }
    if name not in SHIPPED:
        job["model"]["path"] = {"sd3": "sd3.5-medium", "wan": "wan2.1-1.3b"}.get(name, "model")
    if name in ("qwen-image", "sd3", "flux"):
        job["model"] |= dict.fromkeys(("height", "width"), rng.choice([512, 512, 768, 1024]))
    options: list[tuple[float, str, str, list[Any]]] = [
        (0.3, "model", "checkpointing", ["on", "on", "off"]),
        (0.2, "model", "lora_rank", [8, 64]),
        (0.7, "resources.rollout", "num_nodes", [0, 1, 1, 2, 3, 4]),
        (0.4, "", "spot", ["auto", "only", "never"]),
        (0.2, "budget", "deadline", ["2d", "7d", "30d"]),
        (0.2, "budget", "max_hourly", [30, 150]),
        (0.4, "exploration", "mode", ["none", "stale"]),
        (0.3, "runtime", "trainer_ranks", [int(gpu.partition(":")[2]), 1, 1, 2]),
        (0.1, "early", "share", [0.25, "auto"]),
    ]
    for probability, section, field, values in options:
        if rng.random() < probability:
            place = job
            for part in filter(None, section.split(".")):
                place = place.setdefault(part, {})
            place[field] = rng.choice(values)
    if name != "shapes" and rng.random() < 0.7:
        job["target"] = {"metric": "exact_match", "value": 0.9}
    return job


def random_jobs() -> list[dict[str, Any]]:
    rng = random.Random(SEED)
    return [random_job(rng) for _ in range(JOBS)]


def dry_run(job: Mapping[str, Any]) -> dict[str, Any]:
    """Return the answer of `spotrl launch --dry-run --json`: exit code, JSON document, and the message of a refusal."""
    from launcher.cli.main import run

    stdout, stderr = StringIO(), StringIO()
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        file = Path(folder) / "job.yaml"
        file.write_text(json.dumps(job))  # JSON is YAML, and quotes every word
        environ = {"SPOTRL_HOME": f"{folder}/home", "SPOTRL_CONFIG": f"{folder}/none.yaml", "COLUMNS": "120"}
        environ |= {"SKY_RUNTIME_DIR": folder, "HOME": folder}
        stack.enter_context(patch.dict(os.environ, environ))
        stack.enter_context(patch("time.time_ns", return_value=NOW_MS * 1_000_000))
        # The check of a local run loads the model and scores images: seconds, and no part of the plan.
        stack.enter_context(patch("launcher.cli.launch.preflight", return_value={}))
        stack.enter_context(redirect_stdout(stdout))
        stack.enter_context(redirect_stderr(stderr))
        exit_code = run(["launch", str(file), "--dry-run", "--json"])
    # The names of folders say which model is planned, and are no part of the answer.
    model = str(job["model"].get("path", "model"))
    last = stdout.getvalue().replace(folder, "FOLDER").replace(model, "model").strip().splitlines()[-1:]
    document = json.loads(last[0]) if last and last[0].startswith("{") else None
    is_planned = document is not None and "plan" in document
    # A slow machine is told of the work under way. That is no part of the answer.
    lines = stderr.getvalue().replace(folder, "FOLDER").replace(model, "model").splitlines(keepends=True)
    said = "" if is_planned else "".join(line for line in lines if not line.startswith("Planning: "))
    return {"exit_code": exit_code, "document": document, "refusal": said}


def differences(stored: Any, answer: Any, key: str = "") -> Iterator[str]:
    """Yield each difference as `key: stored -> answer`. Keys that are not stored do not count."""
    if isinstance(stored, dict) and isinstance(answer, dict):
        for name in stored:
            if name not in answer:
                yield f"{key}.{name}: {json.dumps(stored[name])[:80]} -> missing"
            else:
                yield from differences(stored[name], answer[name], f"{key}.{name}")
    elif isinstance(stored, list) and isinstance(answer, list) and len(stored) == len(answer):
        for number, pair in enumerate(zip(stored, answer, strict=True)):
            yield from differences(*pair, f"{key}[{number}]")
    elif stored != answer:
        yield f"{key}: {json.dumps(stored)[:80]} -> {json.dumps(answer)[:80]}"


def stored_answers() -> list[dict[str, Any]]:
    return list(json.loads(gzip.decompress(STORED.read_bytes())))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="store the answers in place of comparing them")
    write = parser.parse_args().write
    jobs = random_jobs()
    with multiprocessing.get_context("forkserver").Pool(2) as pool:
        answers = []
        for number, answer in enumerate(pool.imap(dry_run, jobs), start=1):
            answers.append(answer)
            if number % 20 == 0:
                print(f"{number} of {len(jobs)} dry runs", file=sys.stderr)
    if write:
        text = json.dumps(answers, sort_keys=True, separators=(",", ":"))
        STORED.write_bytes(gzip.compress(text.encode(), mtime=0))
        return 0
    changed = 0
    for number, (stored, answer) in enumerate(zip(stored_answers(), answers, strict=True)):
        lines = list(differences(stored, answer))
        changed += bool(lines)
        for line in lines[:5]:
            print(f"job {number}{line}")
    print(f"{changed} of {len(jobs)} answers differ")
    return int(changed > 0)


if __name__ == "__main__":
    sys.exit(main())
