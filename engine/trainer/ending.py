"""The two ways in which a run ends before its target or its last iteration."""


class Stopped(Exception):
    """Stop of the run on request: budget reached, or `spotrl down`."""


class Unhealthy(Exception):
    """Training failure: nothing finite was produced, or a request is poisoned. Continuing would waste money."""
