"""Two workers compute a branch of guidance each, and get the images of one worker bit for bit."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from engine.config import EngineConfig
from engine.diffusion.sampler import initial
from engine.models.guidance_pair import GuidancePair
from engine.parallel.communicator import Communicators, join_store, serve_store
from tests.engine.test_guidance_passes import GUIDED, job


@pytest.fixture
def pair():
    """Return the two ranks of a gloo group in this process, each for a thread of its own."""
    store = serve_store()

    def group(rank):
        return Communicators(join_store(store.port, timeout_seconds=10.0), timeout_seconds=10.0).get(1, rank, 2)

    with ThreadPoolExecutor(2) as threads:
        yield list(threads.map(group, (0, 1)))


def adapter_of(name):
    torch.manual_seed(0)
    return GUIDED[name]()


@torch.no_grad()
def velocities(adapter, group):
    """Return the velocity of two rows alone, in a pair and alone again, and the rows of each forward pass."""
    backend, passes, found = GuidancePair(adapter), [], []
    adapter.transformer.register_forward_pre_hook(
        lambda _, __, named: passes.append(len(named["hidden_states"])), with_kwargs=True
    )
    x, sigma = initial([1, 2], adapter.latent_shape()), torch.tensor([0.3, 0.9])
    conditioning = adapter.encode(["12", "a longer one"])
    for shared in (None, group, None):
        backend.use(shared)
        assert (backend.degree, backend.rank) == ((2, group.rank) if shared else (1, 0))
        found.append(adapter.velocity(x, sigma, conditioning, 3.0))
    return found, passes


@pytest.mark.parametrize("name", GUIDED)
def test_a_pair_gives_the_velocity_of_one_worker_bit_for_bit(pair, name):
    adapters = [adapter_of(name) for _ in pair]
    with ThreadPoolExecutor(2) as threads:
        results = list(threads.map(velocities, adapters, pair))
    for (alone, shared, again), passes in results:
        assert torch.equal(shared, alone)
        assert torch.equal(again, alone)
        assert passes == [2, 2, 2, 2, 2], "two branches alone, one in the pair, two again"


class Three:
    degree, rank = 3, 0


def test_three_workers_cannot_share_two_branches():
    backend = GuidancePair(GUIDED["sd3"]())
    with pytest.raises(ValueError, match="2 branches, which 3 workers cannot share; use a group of 2"):
        backend.use(Three())
    assert backend.degree == 1


@pytest.mark.parametrize(("runtime", "guidance", "words"), [
    ({"sp_degree": 4}, 4.0, r"runtime.sp_degree is 4; guidance has two branches: use sp_degree: 2 or auto"),
    ({}, 4.0, r"runtime.sp_degree is 1"),
    ({"sp_degree": 2}, 1.0, r"sampler.guidance is 1, which has one branch; use guidance above 1"),
])  # fmt: skip
def test_a_job_that_has_no_two_branches_for_two_workers_is_refused(runtime, guidance, words):
    plain = job().model_dump()
    with pytest.raises(ValueError, match=words):
        EngineConfig.model_validate(plain | {
            "runtime": {"cfg_parallel": True, **runtime}, "sampler": {"guidance": guidance},
        })  # fmt: skip
