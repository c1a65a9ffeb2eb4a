import pytest

from launcher.replay import of_plan


@pytest.fixture
def few_replays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replay each plan twice, and not up to 30 times, which takes most of the time of a dry run.

    tests/launcher/replay tests the replays.
    """
    monkeypatch.setattr(of_plan, "NODE_HOURS", 0)
    monkeypatch.setattr(of_plan, "LEAST_STARTS", 2)
