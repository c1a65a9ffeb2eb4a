"""Run the steps of a pass so that an error in one step does not stop the steps after it.

Some steps guard money and data: the budget stop, the release of nodes, the spend deadlines. Other steps are wishes: to
buy a node, to choose a zone. A bug in one step must not keep a guard from its work, so each step runs by itself and the
errors are kept. Nothing is bought in a pass with an error: a decision on half of the facts could buy twice.
"""

from collections.abc import Callable
from typing import TypeVar

Result = TypeVar("Result")


class Steps:
    """The steps of one pass, and the errors that they raised.

    `lets_through`: errors that end the pass at once, such as a lost lease.
    """

    def __init__(self, lets_through: type[Exception]) -> None:
        self._lets_through = lets_through
        self.errors: list[Exception] = []

    def take(self, step: Callable[[], Result], otherwise: Result) -> Result:
        """Return the result of the step, or `otherwise` if the step raises. The error is kept."""
        try:
            return step()
        except self._lets_through:
            raise
        except Exception as error:
            self.errors.append(error)
            return otherwise


def unprotected() -> Steps:
    """Return steps of which every error is raised at once, for replays and tests."""
    return Steps(lets_through=Exception)
