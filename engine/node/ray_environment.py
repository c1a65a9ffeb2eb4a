"""Define Ray's environment variables.

The node's agent sets the variables before `import ray`, and every process inherits the environment.
"""

import hashlib

from engine.node_spec import NodeSpec

GCS_LOST_SECONDS = 10
"""Seconds without an answer from the head after which a raylet ends itself. Its node then looks for a new head."""

PRELOAD = "engine.entrypoints.processes"
"""Module imported by the worker processes kept ready on a spot node: torch and the recogniser (research engine 1)."""

NODE_VARIABLE = "SPOTRL_RAY_NODE"
"""Environment variable with a worker actor's node: the NodeSpec as JSON."""


def ray_environment(spec: NodeSpec) -> dict[str, str]:
    """Return Ray's environment.

    Every Ray process needs a token derived from the rollout role's token. A spot node also keeps processes ready.
    """
    everywhere = {
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
        "RAY_worker_niceness": "0",  # Ray's 15 starves coordinator and workers beside a trainer that uses every core
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": hashlib.sha256(f"ray {spec.rollout_token}".encode()).hexdigest(),
    }
    if spec.role == "trainer":
        return everywhere
    return {
        **everywhere,
        NODE_VARIABLE: spec.model_dump_json(),
        "RAY_preload_python_modules": PRELOAD,
        "RAY_gcs_rpc_server_reconnect_timeout_s": str(GCS_LOST_SECONDS),
    }
