"""The sandboxes: built from packages without an image registry, each with its smoke test; part of a wheel too."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
import tarfile
from io import BytesIO
from pathlib import Path

import pytest

from gyre_sdk.errors import ImageMissing, WorkspaceError
from gyre_sdk.harness.task import Task
from gyre_sdk.harness.workspace import DockerWorkspace, debian
from gyre_sdk.harness.workspace.sandboxes import SANDBOXES, build_sandbox, names, sandboxes, smoke_test

pytestmark = pytest.mark.docker
ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("name", ["base", "python", "verifier", "node"])
def test_every_sandbox_builds_and_passes_its_smoke_test(docker_client, name):
    image = build_sandbox(docker_client, name)
    ran = smoke_test(docker_client, name)
    assert (ran.exit_code, ran.stdout.strip()) == (0, "ok"), ran
    assert build_sandbox(docker_client, name).id == image.id
    found = {one.name: one for one in sandboxes(docker_client)}
    assert found[name].built and found[name].current and found[name].bytes > 1_000_000


def test_there_are_no_others():
    assert names() == ["base", "node", "python", "verifier"]


def test_what_changed_is_built_again(docker_client, base_image, tmp_path):
    place = tmp_path / "trial"
    place.mkdir()
    (place / "Dockerfile").write_text("FROM gyre/base\nRUN echo one >/one\n")
    try:
        with pytest.raises(ImageMissing, match="gyre sandbox build trial"):
            (place / "smoke.sh").write_text("[ -e /one ] && echo ok")
            smoke_test(docker_client, "trial", folder=tmp_path)
        first = build_sandbox(docker_client, "trial", folder=tmp_path)
        assert smoke_test(docker_client, "trial", folder=tmp_path).stdout == "ok\n"
        (place / "Dockerfile").write_text("FROM gyre/base\nRUN echo two >/two\n")
        assert [one.current for one in sandboxes(docker_client, tmp_path)] == [False]
        assert build_sandbox(docker_client, "trial", folder=tmp_path).id != first.id
        assert smoke_test(docker_client, "trial", folder=tmp_path).exit_code != 0
    finally:
        docker_client.api.remove_image("gyre/trial")
        docker_client.api.remove_image(first.id)


def test_an_unknown_sandbox_is_named(docker_client):
    for use in (build_sandbox, smoke_test):
        with pytest.raises(WorkspaceError, match="sandboxes here: base, node, python, verifier"):
            use(docker_client, "nothing")


def test_packages_install_as_root_with_few_capabilities(docker_client):
    """`apt-get`, `dpkg` and `pip` in the root profile, without a network; in the default profile they are refused."""
    image = build_sandbox(docker_client, "python").name
    make = r"""
mkdir -p pkg/DEBIAN pkg/usr/bin pkg/var/lib/thing && cd pkg
printf 'Package: thing\nVersion: 1\nArchitecture: all\nMaintainer: x <x@x>\nDescription: thing\nDepends: bash\n' >DEBIAN/control
printf '#!/bin/sh\nuseradd --system thing && chown thing /var/lib/thing && chmod 2750 /var/lib/thing && su -s /bin/sh thing -c "touch /var/lib/thing/mine"\n' >DEBIAN/postinst
chmod 755 DEBIAN/postinst; printf '#!/bin/sh\necho thing works\n' >usr/bin/thing; chmod 755 usr/bin/thing
dpkg-deb --root-owner-group -b . ../thing.deb >/dev/null; cd ..
mkdir -p it/it && echo 'x = 42' >it/it/__init__.py
printf '[project]\nname = "it"\nversion = "1"\n[tool.setuptools]\npackages = ["it"]\n' >it/pyproject.toml
"""
    with DockerWorkspace(Task(instruction="x", image=image, profile="root"), docker_client) as workspace:
        workspace.exec(make, check=True, timeout=60)
        ran = workspace.exec("apt-get install -y --no-install-recommends ./thing.deb", timeout=60)
        assert ran.exit_code == 0, ran
        assert workspace.exec("thing; stat -c '%U %a' /var/lib/thing; stat -c %U /var/lib/thing/mine").stdout == (
            "thing works\nthing 2750\nthing\n"
        )
        pip = "pip install --break-system-packages --no-build-isolation --no-index ./it && python -c 'import it; print(it.x)'"
        ran = workspace.exec(pip, timeout=60)
        assert ran.stdout.endswith("42\n"), ran
        assert workspace.exec("apt-get remove -y thing && ! command -v thing", timeout=60).exit_code == 0
        held = int(workspace.exec("grep CapEff /proc/self/status").stdout.split()[1], 16)
        assert held == sum(1 << bit for bit in (0, 1, 3, 4, 5, 6, 7))
    with DockerWorkspace(Task(instruction="x", image=image), docker_client) as workspace:
        workspace.exec(make, check=True, timeout=60)
        assert workspace.exec("dpkg -i thing.deb").exit_code != 0
        assert workspace.exec("apt-get install -y ./thing.deb").exit_code != 0


def test_a_tree_of_packages_is_one_that_dpkg_knows():
    content = debian.tree(
        ["hostname"], status=b"Package: libc6\nVersion: 99\nArchitecture: amd64\nStatus: install ok installed\n"
    )
    with tarfile.open(fileobj=BytesIO(content)) as archive:
        found = {entry.name: entry for entry in archive}
        state = archive.extractfile(found[debian.STATUS]).read().decode()
        listed = archive.extractfile(found["var/lib/dpkg/info/hostname.list"]).read().decode().splitlines()
    assert "Package: hostname\nStatus: install ok unpacked\n" in state
    assert "Package: libc6" in state
    assert "usr/bin/hostname" in found and found["usr/bin/hostname"].uid == 0
    assert "/bin/hostname" in listed and not any(name.startswith(("bin/", "usr/share/man/")) for name in found)


@pytest.mark.parametrize(
    ("name", "place"),
    [("bin/sh", "usr/bin/sh"), ("lib64/ld.so", "usr/lib64/ld.so"), ("bin", "bin"), ("etc/x", "etc/x")],
)
def test_paths_of_a_merged_usr(name, place):
    assert debian.merged(name) == place


def test_packages_that_do_not_exist_are_named():
    with pytest.raises(WorkspaceError, match="no-such-package-3141"):
        debian.tree(["no-such-package-3141"])


def test_a_wheel_has_the_sandboxes(tmp_path):
    """Built from a copy, unpacked, and asked from there."""
    source = tmp_path / "source"
    for name in ("gyre_sdk", "sandboxes"):
        shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    wheel = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", str(tmp_path / "out"), str(source)]
    if importlib.util.find_spec("setuptools") is not None:
        wheel.insert(4, "--no-build-isolation")
    subprocess.run(wheel, check=True, cwd=tmp_path, timeout=200)
    [built] = (tmp_path / "out").glob("*.whl")
    shutil.unpack_archive(built, tmp_path / "installed", "zip")
    code = "from gyre_sdk.harness.workspace import sandboxes as s; print(s.SANDBOXES, *s.names())"
    run = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env={"PYTHONPATH": str(tmp_path / "installed"), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert run.stdout.split() == [str(tmp_path / "installed" / "gyre_sdk" / "sandboxes"), *names()]
    for name in names():
        for file in (SANDBOXES / name).iterdir():
            assert (tmp_path / "installed/gyre_sdk/sandboxes" / name / file.name).read_bytes() == file.read_bytes()
