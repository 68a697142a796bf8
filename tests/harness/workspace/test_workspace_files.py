"""What lies in a workspace comes out as it is, or is refused: whatever an agent made of it."""

from __future__ import annotations

import os

import pytest

from gyre_sdk.errors import WorkspaceError
from gyre_sdk.harness.task import Task
from gyre_sdk.harness.workspace import LocalWorkspace
from gyre_sdk.harness.workspace import files as files_module


def test_links_of_every_kind_come_out(workspace, tmp_path):
    """Package managers link files hard by the thousand; what is asked for may itself be a link."""
    workspace.exec(
        "mkdir -p links/in; cd links; echo 1 >in/a; ln in/a b; ln b in/c; ln -s in/a soft; ln -s in folder", check=True
    )
    workspace.download("links", tmp_path / "links")
    assert {
        name: (tmp_path / "links" / name).read_text() for name in ("in/a", "b", "in/c", "soft", "folder/a")
    } == dict.fromkeys(("in/a", "b", "in/c", "soft", "folder/a"), "1\n")
    workspace.download("links/soft", tmp_path / "soft")
    workspace.download("links/folder/", tmp_path / "folder")
    assert (tmp_path / "soft").read_text() == (tmp_path / "folder" / "a").read_text() == "1\n"
    assert not (tmp_path / "soft").is_symlink() and not (tmp_path / "folder").is_symlink()


def test_a_link_that_is_uploaded_is_what_it_leads_to(workspace, tmp_path):
    (tmp_path / "real").write_text("x")
    (tmp_path / "link").symlink_to("real")
    workspace.upload(tmp_path / "link", "uploaded")
    assert workspace.read("uploaded") == b"x"


@pytest.mark.parametrize(
    ("made", "path", "words"),
    [
        ("mkdir -p odd/pipe; mkfifo odd/pipe/p", "odd/pipe", "special file"),
        ("mkdir -p odd/abs; ln -s /etc/passwd odd/abs/l", "odd/abs", "absolute path"),
        ("true", "odd/none", "no such file"),
    ],
)
def test_what_cannot_come_out_is_said(workspace, tmp_path, made, path, words):
    workspace.exec(made)
    with pytest.raises(WorkspaceError, match=words):
        workspace.download(path, tmp_path / "out")


def test_a_place_that_cannot_be_written_is_said(workspace, tmp_path):
    workspace.exec("mkdir -p place; echo 1 >place/a", check=True)
    (tmp_path / "file").touch()
    for path, local in (("place", tmp_path / "file"), ("place/a", tmp_path), ("place/a", tmp_path / "file" / "below")):
        with pytest.raises(WorkspaceError, match="cannot be written as"):
            workspace.download(path, local)


def test_more_than_memory_should_hold_is_refused(workspace, tmp_path, monkeypatch):
    """A file of any size costs an agent nothing."""
    monkeypatch.setattr(files_module, "DOWNLOAD_LIMIT", 1 << 20)
    workspace.exec("mkdir -p big; truncate -s 100G big/a; echo 1 >b", check=True)
    for path in ("big", "big/a"):
        with pytest.raises(WorkspaceError, match="more than 1 MiB"):
            workspace.download(path, tmp_path / "out")
    workspace.download("b", tmp_path / "b")
    assert (tmp_path / "b").read_text() == "1\n"


def test_a_path_that_is_longer_than_any_is_said(workspace, tmp_path):
    name = "n" * 200
    workspace.exec(f"for i in $(seq 22); do mkdir -p {name} && cd -P {name} || exit 1; done", check=True)
    with pytest.raises(WorkspaceError, match=r"path of more than|not readable"):
        workspace.download(name, tmp_path / "out")


def test_folders_nested_without_end_are_removed():
    with LocalWorkspace(Task(instruction="x")) as workspace:
        root = workspace._root
        folder = os.open(root / "workspace", os.O_RDONLY)
        for _ in range(1100):
            os.mkdir("d", dir_fd=folder)
            below = os.open("d", os.O_RDONLY, dir_fd=folder)
            os.close(folder)
            folder = below
        os.close(folder)
    assert not os.path.lexists(root)
