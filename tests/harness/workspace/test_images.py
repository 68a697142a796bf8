"""Images: built once by whoever needs them first, from what a build sees; for the engine's architecture or refused."""

from __future__ import annotations

import hashlib
import io
import json
import os
import tarfile
from concurrent.futures import ThreadPoolExecutor

import pytest

from gyre_sdk.errors import ImageMissing, WorkspaceError
from gyre_sdk.harness.task import Task
from gyre_sdk.harness.workspace import DockerWorkspace
from gyre_sdk.harness.workspace.contexts import context_of, digest_of, entries
from gyre_sdk.harness.workspace.images import BUILT, TASK_IMAGES, ensure_image
from gyre_sdk.harness.workspace.sweeping import sweep_images

pytestmark = pytest.mark.docker


@pytest.fixture
def context(tmp_path):
    (tmp_path / "Dockerfile").write_text("FROM gyre/base\nCOPY . /context\nRUN date +%s%N >/built\n")
    (tmp_path / "a").write_text("1")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "b").write_text("2")
    (tmp_path / "ignored").mkdir()
    (tmp_path / "ignored" / "big").write_text("3")
    (tmp_path / ".dockerignore").write_text("# what a build does not see\nignored\n**/*.log\n!keep.log\n")
    (tmp_path / "x.log").write_text("4")
    (tmp_path / "keep.log").write_text("5")
    return tmp_path


def test_what_a_build_sees(context):
    assert entries(context) == [".dockerignore", "Dockerfile", "a", "folder", "folder/b", "keep.log"]
    with tarfile.open(fileobj=io.BytesIO(context_of(context, {"extra": b"6"}))) as archive:
        assert sorted(archive.getnames()) == sorted([*entries(context), "extra"])
        assert {entry.uid for entry in archive} == {0}


def test_a_digest_tells_what_matters(context):
    first = digest_of(context, ["base=1"])
    (context / "ignored" / "big").write_text("changed")
    os.utime(context / "a", (1, 1))
    assert digest_of(context, ["base=1"]) == first
    seen = {first, digest_of(context, ["base=2"])}
    for change in (
        lambda: (context / "a").write_text("other"),
        lambda: (context / "a").chmod(0o755),
        lambda: (context / "link").symlink_to("a"),
        lambda: [(context / "link").unlink(), (context / "link").symlink_to("folder/b")],
        lambda: (context / "empty").mkdir(),
        lambda: (context / "a").rename(context / "c"),
    ):
        change()
        seen.add(digest_of(context, ["base=1"]))
    assert len(seen) == 8


def test_many_at_once_build_once(docker_client, base_image, context):
    task = Task(instruction="x", dockerfile=context)
    with ThreadPoolExecutor(6) as threads:
        found = list(threads.map(lambda _: ensure_image(docker_client, task), range(6)))
    assert len({one.id for one in found}) == 1
    assert found[0].name.startswith(f"{TASK_IMAGES}:") and found[0].labels[BUILT] == found[0].name
    with DockerWorkspace(task, docker_client) as workspace:
        assert workspace.exec("cd /context && find . -type f | sort").stdout.split() == [
            "./.dockerignore",
            "./Dockerfile",
            "./a",
            "./folder/b",
            "./keep.log",
        ]
        assert found[0].name not in sweep_images(docker_client)  # in use
    assert found[0].name in sweep_images(docker_client)
    assert docker_client.api.images(found[0].name) == []


def test_a_base_that_cannot_be_had_is_said(docker_client, base_image, tmp_path):
    (tmp_path / "Dockerfile").write_text("FROM registry.invalid/no/such:image\n")
    with pytest.raises(WorkspaceError, match="its base image is not present and cannot be pulled"):
        ensure_image(docker_client, Task(instruction="x", dockerfile=tmp_path))
    with pytest.raises(ImageMissing, match="docker pull no/such"):
        ensure_image(docker_client, Task(instruction="x", image="no/such"))


def test_an_image_for_another_architecture_is_refused_before_it_starts(docker_client, base_image):
    other = "arm64" if docker_client.version()["Arch"] == "amd64" else "amd64"
    layer = io.BytesIO()
    with tarfile.open(fileobj=layer, mode="w") as archive:
        archive.addfile(tarfile.TarInfo("empty"))
    config = {
        "architecture": other,
        "os": "linux",
        "config": {},
        "rootfs": {"type": "layers", "diff_ids": [f"sha256:{hashlib.sha256(layer.getvalue()).hexdigest()}"]},
    }
    name = "gyre-test/elsewhere:1"
    manifest = [{"Config": "config.json", "RepoTags": [name], "Layers": ["layer.tar"]}]
    image = io.BytesIO()
    with tarfile.open(fileobj=image, mode="w") as archive:
        for file, content in (
            ("config.json", json.dumps(config).encode()),
            ("manifest.json", json.dumps(manifest).encode()),
            ("layer.tar", layer.getvalue()),
        ):
            entry = tarfile.TarInfo(file)
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))
    docker_client.images.load(image.getvalue())
    try:
        with pytest.raises(
            WorkspaceError, match=f"'{name}' is for {other}, the Docker engine runs on .*; use an image"
        ):
            DockerWorkspace(Task(instruction="x", image=name), docker_client)
    finally:
        docker_client.api.remove_image(name)
