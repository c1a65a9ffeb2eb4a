"""Rights of the coordinator's callers, by the role that a caller's token proves.

trainer     every call of workers and trainer: it runs beside the coordinator
rollout     what a spot node needs: leases, commits, results, weights to read, logs to ship; nothing that changes the
            run for others: no weights, no tasks, no stop, no capacity
controller  capacity, stop, health

Every role has a token of its own, derived from the run's (`engine.config.role_token`). The run's token opens nothing.
On a Ray cluster a role binds only those who use it: Ray runs any code for whoever has the cluster's own token.
"""

import hmac
from collections.abc import Mapping
from typing import Any

from engine.config import Role, role_token

CALLS_OF_A_SPOT_NODE = frozenset(
    {"pull", "heartbeat", "finish", "commit", "give_back", "fault", "notice", "states", "weights"}
)
"""The coordinator's other calls are the trainer's."""

ROUTES: Mapping[Role, frozenset[str]] = {
    "trainer": frozenset({"/call", "/presence", "/ship", "/ray", "/health"}),
    "rollout": frozenset({"/call", "/presence", "/ship", "/ray", "/health"}),
    "controller": frozenset({"/capacity", "/stop", "/health"}),
}


class WrongToken(Exception):
    """The token is none of this run's."""


class NotAllowed(Exception):
    """The token is known, and its role may not do this."""


class Rights:
    """The rights of one run's roles."""

    def __init__(self, run_token: str) -> None:
        self._tokens: dict[Role, bytes] = {role: role_token(run_token, role).encode() for role in ROUTES}

    def check(self, token: str, route: str) -> Role:
        """Return the role of the caller. Raises WrongToken, or NotAllowed if the role may not use this route."""
        given = token.encode()
        matches = [role for role, known in self._tokens.items() if hmac.compare_digest(given, known)]
        if not matches:
            raise WrongToken("wrong token")
        if route not in ROUTES[matches[0]]:
            _refuse(matches[0], route)
        return matches[0]

    def check_call(self, token: str, head: Mapping[str, Any]) -> None:
        """Raise WrongToken, or NotAllowed if the caller's role may not make this call."""
        role = self.check(token, "/call")
        if role == "rollout" and head.get("call") not in CALLS_OF_A_SPOT_NODE:
            _refuse(role, f"the call {head.get('call')!r} of {head.get('node', 'a node that it does not name')}")


def _refuse(role: Role, what: str) -> None:
    text = f"the token of the role {role} does not allow {what}"
    print(text, flush=True)
    raise NotAllowed(text)
