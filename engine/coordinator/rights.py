"""Check the rights of the coordinator's callers. A caller's token proves the caller's role.

trainer     every call of workers and trainer, because the trainer runs beside the coordinator
rollout     the calls of a spot node: leases, commits, results, weights to read, logs to ship; no call that changes the
            run for other nodes: no weights, no tasks, no stop, no capacity
ranks       a further node of the trainer: the meeting of the ranks, logs to ship, and the calls of a worker that has
            its weights from rank 0: leases, commits, results, paid judges
controller  capacity, stop, health

Every role has its own token, derived from the run's token (`engine.node_spec.role_token`). The run's token itself gives
no rights. On a Ray cluster, roles do not bind a hostile caller: Ray runs any code for a holder of the cluster's own
token.
"""

import hmac
from collections.abc import Mapping
from typing import Any, get_args

from engine.node_spec import Role, role_token
from engine.protocol.messages import FetchStates, JudgeCall, LeaseCall, NodeCall, tag_of

CALLS_OF_A_SPOT_NODE = frozenset(tag_of(call) for call in get_args(NodeCall))
"""Calls allowed to spot nodes. Only the trainer may make the coordinator's remaining calls."""

CALLS_OF_A_RANK = frozenset(tag_of(call) for call in (*get_args(LeaseCall), *get_args(JudgeCall), FetchStates))
"""Calls allowed to further nodes of the trainer: those of a worker that loads no weights."""

CALLS: Mapping[Role, frozenset[str]] = {"ranks": CALLS_OF_A_RANK, "rollout": CALLS_OF_A_SPOT_NODE}
"""Calls allowed to a role that may not make every call."""

ROUTES: Mapping[Role, frozenset[str]] = {
    "trainer": frozenset({"/call", "/weights", "/presence", "/ship", "/ray", "/ranks", "/health"}),
    "ranks": frozenset({"/call", "/presence", "/ranks", "/ship", "/health"}),
    "rollout": frozenset({"/call", "/weights", "/presence", "/ship", "/ray", "/health"}),
    "controller": frozenset({"/capacity", "/stop", "/health"}),
}


class WrongToken(Exception):
    """Refusal of a token unknown to this run."""


class NotAllowed(Exception):
    """Refusal of a known token: the token's role does not allow the call."""


class Rights:
    """Token check for one run's roles."""

    def __init__(self, run_token: str) -> None:
        self._tokens: dict[Role, bytes] = {role: role_token(run_token, role).encode() for role in ROUTES}

    def check(self, token: str, route: str) -> Role:
        """Return the role of the caller. Raises WrongToken, or NotAllowed if the role may not use this route."""
        token_bytes = token.encode()
        matches = [role for role, role_token in self._tokens.items() if hmac.compare_digest(token_bytes, role_token)]
        if not matches:
            raise WrongToken("wrong token")
        if route not in ROUTES[matches[0]]:
            _refuse(matches[0], route)
        return matches[0]

    def check_call(self, token: str, head: Mapping[str, Any]) -> None:
        """Raise WrongToken, or NotAllowed if the caller's role may not make the call in this head.

        Called before the head is decoded: a caller without the right gets no error of the codec.
        """
        role = self.check(token, "/call")
        if role in CALLS and str(head.get("call")) not in CALLS[role]:
            _refuse(role, f"the call {head.get('call')!r} of {head.get('node', 'a node that it does not name')}")


def _refuse(role: Role, action: str) -> None:
    text = f"the token of the role {role} does not allow {action}"
    print(text, flush=True)
    raise NotAllowed(text)
