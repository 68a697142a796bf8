"""What scoring does at the start of a run, before the agent: scrub and seal."""

from __future__ import annotations

from gyre_sdk.harness.ports import Workspace
from gyre_sdk.harness.scoring.history import scrub_history
from gyre_sdk.harness.scoring.seal import take_seal
from gyre_sdk.harness.scoring.watch import Seal
from gyre_sdk.harness.task import Task
from gyre_sdk.harness.workspace import DockerWorkspace, Isolation, LocalWorkspace, PooledWorkspace


def prepare(task: Task, workspace: Workspace) -> Seal | None:
    """Scrub the future history of repositories and seal what steers the evaluation; call it before the agent begins.

    Returns:
        The seal to pass to `evaluate`; None where nothing is compared: in `shared` mode without `Task.protected`, in an image
        without `find` and `sha256sum`, and in a local workspace without isolation.

    Raises:
        TaskError: a repository still knows its future and cannot be scrubbed.
        WorkspaceError: the workspace could not be asked.
    """
    place = workspace.inner if isinstance(workspace, PooledWorkspace) else workspace
    if not isinstance(place, DockerWorkspace | LocalWorkspace):
        return None
    image = place.image.id if isinstance(place, DockerWorkspace) else None
    scrub_history(task, workspace, place.workdir, image=image)
    if task.verifier_mode == "shared" and not task.protected:
        return None
    if isinstance(place, LocalWorkspace) and place.isolation is Isolation.NONE:
        return None
    return take_seal(task, workspace, workdir=place.workdir)
