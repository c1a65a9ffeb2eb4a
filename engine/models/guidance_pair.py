"""Two workers share an image by the branches of classifier-free guidance (CFG parallel), not by its sequence.

    both: equal latents -> first: branch with the prompt, second: branch without -> one all-gather -> both: velocity

A step exchanges one latent for each row, where Ulysses exchanges data twice in each layer. Each branch is computed as
on one worker, so the images are those of one worker bit for bit. Guidance of 1, and networks that take the scale as an
input, have one branch: there both workers compute the same.
"""

from engine.models.adapter import DiTAdapter
from engine.parallel.communicator import SPGroup

DEGREES = (1, 2)


class GuidancePair:
    """`SPBackend` (engine/parallel/ulysses.py) of an adapter. The largest degree is 2: there are two branches."""

    def __init__(self, adapter: DiTAdapter) -> None:
        self._adapter = adapter

    @property
    def degree(self) -> int:
        pair = self._adapter.guidance_pair
        return 1 if pair is None else pair.degree

    @property
    def rank(self) -> int:
        pair = self._adapter.guidance_pair
        return 0 if pair is None else pair.rank

    def use(self, group: SPGroup | None) -> None:
        """Share forward passes with this group from now on. None: alone. Raises ValueError above degree 2."""
        if group is not None and group.degree not in DEGREES:
            raise ValueError(f"guidance has 2 branches, which {group.degree} workers cannot share; use a group of 2")
        self._adapter.guidance_pair = None if group is None or group.degree == 1 else group
