"""The phases of a node on a real cloud.

    unfinished -> requested -> launched -> set up
                      ^            |          |
                      +------------+----------+    the launch or the login was lost in a power cut

    any of these -> ending -> ended -> cleared     released, refused, failed, lost, or reported gone by the cloud

The phase is not stored. `phase_of` derives the phase from the files, which are whole after a crash, so any process may
continue the work, also with files of a version without phases.
"""

from enum import StrEnum

from launcher.provision.sky.cloud_node import CloudNode


class Phase(StrEnum):
    """The part of a node's life that determines the next step."""

    UNFINISHED = "unfinished"
    """The request was interrupted before `spec.json`. A repeated request completes the files."""
    REQUESTED = "requested"
    """No launch is known."""
    LAUNCHED = "launched"
    """The launch was sent to SkyPilot. The VM starts and is set up."""
    SET_UP = "set up"
    """The VM can be logged in to. An agent runs, or is about to."""
    ENDING = "ending"
    """The VM and its disks are terminated."""
    ENDED = "ended"
    """No VM and no disk is left. SkyPilot still has the name on record."""
    CLEARED = "cleared"
    """Nothing is left to do."""


def phase_of(node: CloudNode) -> Phase:
    """Return the node's phase. An end counts from its first sign on, even if the file cannot be read any more."""
    if node.is_cleared():
        return Phase.CLEARED
    if node.files.has("ended"):
        return Phase.ENDED
    if node.is_ending:
        return Phase.ENDING
    if not node.files.has("spec") and not node.is_damaged:
        return Phase.UNFINISHED
    if not node.files.has("launch"):
        return Phase.REQUESTED
    if not node.files.has("login"):
        return Phase.LAUNCHED
    return Phase.SET_UP
