"""What Ray reads from the environment, before `import ray`: the node's agent sets it, every process inherits it."""

import hashlib

from engine.config import NodeSpec

GCS_LOST_SECONDS = 10
"""A raylet whose head does not answer for so long ends itself; its node then looks for a new head."""

PRELOAD = "engine.runtime.processes"
"""What the workers that a spot node keeps ready have imported: torch and the recogniser (research engine 1)."""

NODE_VARIABLE = "SPOTRL_RAY_NODE"
"""Names to a worker actor the node that it runs on: its NodeSpec as JSON."""


def ray_environment(spec: NodeSpec) -> dict[str, str]:
    """Ray asks everyone for a token that is made from the rollout nodes'; on spot nodes it keeps processes ready."""
    everywhere = {
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
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
