"""The phases of a node on a real cloud.

    unfinished -> requested -> launched -> set up
                      ^            |          |
                      +------------+----------+    the launch or the login was lost in a power cut

    any of these -> ending -> ended -> cleared     released, refused, failed, lost, or reported gone by the cloud

The phase is not stored. `phase_of` derives the phase from the node's files. A crash leaves no half-written file, so any
process can continue the work. Files of an older version, which had no phases, work too.
"""

from enum import StrEnum

from launcher.provision.sky.cloud_node import CloudNode


class Phase(StrEnum):
    """Progress of a node between its request and its cleanup. The provisioner chooses its next action by the phase."""

    UNFINISHED = "unfinished"
    """The request was interrupted before `spec.json`. A repeated request completes the files."""
    REQUESTED = "requested"
    """No launch is known."""
    LAUNCHED = "launched"
    """The launch was sent to SkyPilot. The VM starts and is set up."""
    SET_UP = "set up"
    """SSH login to the VM is possible. The agent runs, or is started next."""
    ENDING = "ending"
    """The VM and its disks are terminated."""
    ENDED = "ended"
    """No VM and no disk is left. SkyPilot still has the name on record."""
    CLEARED = "cleared"
    """Nothing is left to do."""


def phase_of(node: CloudNode) -> Phase:
    """Return the node's phase.

    Once a file orders or records the node's end, the phase is ENDING or later, even if the file cannot be read.
    """
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
