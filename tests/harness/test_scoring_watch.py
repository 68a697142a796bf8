"""What is watched, what is done about a change, what is put back of an image: decisions, without a workspace."""

from __future__ import annotations

import hashlib
import tomllib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gyre_sdk.harness.scoring.retained import note_left
from gyre_sdk.harness.scoring.system import ADDED, DELETED, MODIFIED, plan
from gyre_sdk.harness.scoring.watch import Do, Kept, Seal, Watched, changes, parse, with_sections

SEALED = '[project]\nname = "x"\n\n[tool.pytest.ini_options]\naddopts = "-q"\n'


@pytest.mark.parametrize(
    "planted",
    [
        "[tool.pytest.ini_options]\naddopts = '--co'\n",
        "[tool.pytest]\naddopts = ['--co']\n",
        "[ tool . pytest . ini_options ]\naddopts = '--co'\n",
        "[project]\nname = 'y'\n[tool.pytest.ini_options]\ntestpaths = [\n  'a',\n]\n[tool.ruff]\nline-length = 9\n",
    ],
)
@pytest.mark.parametrize("sealed", ["", SEALED])
def test_the_section_for_pytest_is_as_it_was(planted, sealed):
    made = with_sections("pyproject.toml", planted, sealed)
    found = tomllib.loads(made)
    assert found.get("tool", {}).get("pytest") == tomllib.loads(sealed).get("tool", {}).get("pytest")
    if "ruff" in planted:
        assert found["tool"]["ruff"] == {"line-length": 9} and found["project"] == {"name": "y"}


@pytest.mark.parametrize(
    "spelling",
    [
        "[tool]\npytest.ini_options.addopts = '--co'\n",
        "[tool]\npytest = { ini_options = { addopts = '--co' } }\n",
        "tool.pytest.ini_options.addopts = '--co'\n",
        "[tool.'pytest'.ini_options]\naddopts = '--co'\n",
        '["tool"."pytest".ini_options]\naddopts = "--co"\n',
    ],
)
def test_a_spelling_that_no_line_shows_gives_the_whole_file_back(spelling):
    assert with_sections("pyproject.toml", spelling, SEALED) is None
    assert with_sections("pyproject.toml", spelling, "") is None


def test_what_is_not_about_pytest_stays():
    more = SEALED.replace('"x"', '"y"') + "[tool.mypy]\nstrict = true\n"
    assert with_sections("pyproject.toml", more, SEALED) == more
    assert with_sections("pyproject.toml", "[project]\nname = 'y'\n", "") == "[project]\nname = 'y'\n"
    cfg = "[metadata]\nname = y\n[tool:pytest]\naddopts = --co\n[flake8]\nx = 1\n"
    assert with_sections("setup.cfg", cfg, "") == "[metadata]\nname = y\n[flake8]\nx = 1\n"
    assert (
        with_sections("tox.ini", "[pytest]\naddopts = --co\n", "[pytest]\naddopts = -q\n") == "[pytest]\naddopts = -q\n"
    )


@given(st.text(max_size=80), st.sampled_from(["pyproject.toml", "setup.cfg"]))
def test_any_text_ends_up_as_the_sealed_says_or_is_refused(text, name):
    made = with_sections(name, text, SEALED if name.endswith("toml") else "[tool:pytest]\naddopts = -q\n")
    assert made is None or 'addopts = "-q"' in made or "addopts = -q" in made


NAME = st.text(st.characters(blacklist_characters="\0\n", blacklist_categories=["Cs"]), min_size=1, max_size=9)


@given(
    st.dictionaries(NAME.map("/w/".__add__), st.binary(max_size=4)), st.dictionaries(NAME.map("/w/l/".__add__), NAME)
)
def test_a_listing_is_read_as_it_was_written(files, links):
    """Paths and link targets are the agent's: whatever they are, no record can be taken for another."""
    records = f"={Watched.STEERING}\0".encode()
    for path, content in files.items():
        escaped = "\\" in path
        shown = ("\\" if escaped else "") + hashlib.sha256(content).hexdigest() + "  " + path.replace("\\", "\\\\")
        records += shown.encode() + b"\0"
    for path, target in links.items():
        records += f"{path}\0@{target}\0".encode()
    found = parse(records)[Watched.STEERING]
    want = {path: f"sha256:{hashlib.sha256(content).hexdigest()}" for path, content in files.items()}
    assert found == want | {path: f"link:{target}" for path, target in links.items()}


def a_seal(**groups):
    kept = {"/w/conftest.py": Kept(0o644, b"x"), "/w/data": Kept(0o644, b"d"), "/w/.git/config": Kept(0o644, b"")}
    return Seal("/w", ("/home/a",), ("/w/bin",), frozenset({"python", "sh"}), groups, kept)


@pytest.mark.parametrize(
    ("why", "before", "after", "do"),
    [
        ("steering", {}, {"/w/conftest.py": "sha256:1"}, Do.REMOVE),
        ("steering", {"/w/conftest.py": "sha256:0"}, {"/w/conftest.py": "sha256:1"}, Do.PUT_BACK),
        ("steering", {"/w/conftest.py": "sha256:0"}, {"/w/conftest.py": "link:/x"}, Do.PUT_BACK),
        ("steering", {"/w/conftest.py": "sha256:0"}, {}, Do.PUT_BACK),
        ("steering", {"/w/large.pth": "sha256:0"}, {"/w/large.pth": "sha256:1"}, Do.REMOVE),
        ("steering", {"/w/.git/config": "sha256:0"}, {}, None),  # the repository was removed
        ("steering", {"/w/x.pth": "sha256:0"}, {"/w/x.pth": "sha256:0"}, None),
        ("program", {}, {"/w/bin/python": "sha256:1"}, Do.REMOVE),
        ("program", {}, {"/w/bin/my-tool": "sha256:1"}, None),
        ("protected", {"/w/data": "sha256:0"}, {"/w/data": "sha256:1"}, Do.PUT_BACK),
        ("protected", {"/w/large": "sha256:0"}, {"/w/large": "sha256:1"}, Do.REPORT),
        ("protected", {"/w/large": "sha256:0"}, {}, Do.REPORT),
        ("protected", {}, {"/w/more": "sha256:1"}, Do.REMOVE),
        ("tests", {"/w/t.py": "sha256:0"}, {"/w/t.py": "sha256:1"}, Do.REPORT),
        ("tests", {"/w/t.py": "sha256:0"}, {}, None),
        ("section", {}, {"/w/tox.ini": "sha256:1"}, Do.SECTION),
        ("setuid", {}, {"/w/sh": "sha256:1"}, Do.UNSET),
    ],
)
def test_what_is_done_about_a_change(why, before, after, do):
    found = changes(a_seal(**{why: before}), {why: after})
    assert [change.do for change in found] == ([] if do is None else [do])
    path = next(iter({**before, **after}))
    assert changes(a_seal(**{why: before}), {why: after}, kept=[path]) == []


P = "/usr/local/lib/python3.11"


@pytest.mark.parametrize(
    ("diff", "put_back", "emptied"),
    [
        ({"/usr/bin": MODIFIED, "/usr/bin/python3": MODIFIED}, ["/usr/bin/python3"], []),
        ({"/usr/bin/grep": MODIFIED, "/usr/bin/grep/x": ADDED}, ["/usr/bin/grep"], []),
        ({"/bin/bash": DELETED}, ["/bin/bash"], []),
        ({f"{P}/os.py": MODIFIED, f"{P}/json": MODIFIED}, [f"{P}/json", f"{P}/os.py"], []),
        ({f"{P}/__pycache__/os.cpython-311.pyc": MODIFIED}, [], []),
        ({f"{P}/site-packages/pytest/main.py": MODIFIED, f"{P}/site-packages/numpy/x.py": MODIFIED}, [f"{P}/site-packages/pytest/main.py"], []),
        ({f"{P}/site-packages/evil.pth": ADDED, f"{P}/site-packages/new/x.py": ADDED}, [], [f"{P}/site-packages/evil.pth"]),
        ({f"{P}/sitecustomize.py": ADDED}, [], [f"{P}/sitecustomize.py"]),
        ({"/usr/local/bin/git": ADDED, "/usr/local/bin/tool": ADDED}, [], ["/usr/local/bin/git"]),
        ({"/etc/ld.so.preload": ADDED, "/etc/profile": MODIFIED, "/etc/nginx/nginx.conf": MODIFIED}, ["/etc/profile"], ["/etc/ld.so.preload"]),
        ({"/workspace/a": MODIFIED, "/var/lib/dpkg/status": MODIFIED, "/root/.bashrc": ADDED, "/tmp/x": ADDED}, [], []),
    ],
)  # fmt: skip
def test_what_is_put_back_of_an_image(diff, put_back, emptied):
    found = plan(diff.items(), {"git", "python3"})
    assert (list(found.put_back), list(found.emptied)) == (put_back, emptied)


def test_notes_of_what_was_left():
    assert note_left(["file /tests/a b", "process sh -c x ", "noise"]) == [
        "/tests/a b: there before the evaluation; taken away",
        "process alive at the agent's end: sh -c x; killed",
    ]
