"""Settings: the three sources, and errors that name key, value, place and next step."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import pytest

from gyre_sdk.errors import SettingsError
from gyre_sdk.settings import load


class Section(msgspec.Struct, frozen=True):
    steps: Annotated[int, msgspec.Meta(ge=1)] = 10
    rate: float = 0.5
    name: str = "a"
    betas: tuple[float, float] = (0.9, 0.99)
    place: Path | None = None
    options: dict[str, Any] = {}
    launcher: Literal["local", "ray"] = "local"
    order: Literal["first", "last"] | None = None


class Named(msgspec.Struct, frozen=True):
    weight: Annotated[float, msgspec.Meta(ge=0)] = 1.0


class Whole(msgspec.Struct, frozen=True):
    section: Section = Section()
    maybe: Section | None = None
    needed: str = ""
    named: dict[str, Named] = {}
    amounts: dict[str, float] = {}


class Strict(msgspec.Struct, frozen=True):
    needed: str


def write(folder: Path, text: str) -> Path:
    path = folder / "config.toml"
    path.write_text(text)
    return path


def test_defaults_without_a_file() -> None:
    assert load(Whole) == Whole()


def test_file_environment_arguments_in_that_order(tmp_path: Path) -> None:
    path = write(tmp_path, "[section]\nsteps = 1\nrate = 1.0\nname = 'file'\n")
    environ = {"GYRE__SECTION__STEPS": "2", "GYRE__SECTION__NAME": "env", "OTHER__SECTION__STEPS": "9"}
    found = load(Whole, path, ["section.steps=3"], prefix="GYRE", environ=environ)
    assert (found.section.steps, found.section.rate, found.section.name) == (3, 1.0, "env")


def test_the_environment_is_not_read_without_a_prefix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("__SECTION__STEPS", "4")
    assert load(Whole).section.steps == 10


@pytest.mark.parametrize(
    ("text", "value"),
    [("[section]\noptions = {a = 1}", {"a": 1}), ("[section.options]\nb = [1, 'x']", {"b": [1, "x"]})],
)
def test_dictionaries_take_any_key(tmp_path: Path, text: str, value: dict[str, Any]) -> None:
    assert load(Whole, write(tmp_path, text)).section.options == value


def test_relative_paths_belong_to_the_files_folder(tmp_path: Path) -> None:
    path = write(tmp_path, "[section]\nplace = '../x/y'\n")
    assert load(Whole, path).section.place == tmp_path.parent / "x" / "y"
    assert load(Whole, path, ["section.place=/abs"]).section.place == Path("/abs")


def test_mapping_overrides_keep_their_types() -> None:
    assert load(Whole, overrides={"section.name": "7", "maybe.steps": 5}).section.name == "7"


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("[section]\nstepps = 3", ["section.stepps", "3", "config.toml", "did you mean 'steps'?"]),
        ("[sektion]\nsteps = 3", ["sektion", "config.toml", "did you mean 'section'?"]),
        ("zzz = 3", ["zzz = 3", "known keys: amounts, maybe, named, needed, section"]),
        ("[maybe]\nstep = 3", ["maybe.step", "did you mean 'steps'?"]),
        ("[section]\nsteps = 'three'", ["section.steps = 'three'", "config.toml", "expected int, got str"]),
        ("[section]\nsteps = 0", ["section.steps = 0", "config.toml", ">= 1"]),
        ("[section]\nbetas = [0.9]", ["section.betas", "config.toml"]),
        ("[section]\nbetas = [0.9, 'x']", ["section.betas[1] = 'x'", "expected float"]),
        ("[section]\nplace = 3", ["section.place = 3", "config.toml"]),
        ("[section]\nlauncher = 'slurm'", ["section.launcher = 'slurm'", "config.toml", "expected 'local' or 'ray';"]),
        ("[maybe]\norder = 'x'", ["maybe.order = 'x'", "expected 'first' or 'last'; correct the value"]),
        ("section = 3", ["section = 3", "config.toml", "expected a table, got int"]),
        ("maybe = 3", ["maybe = 3 in", "expected a table, got int"]),
        ("[section]\nbetas = 'x'", ["section.betas = 'x'", "expected list, got str"]),
        ("[named.a]\nweight = 2\n[named.b]\nwieght = 2", ["named.b.wieght = 2", "did you mean 'weight'?"]),
        ("[named.a]\nweight = 2\n[named.b]\nweight = -1", ["named.b.weight = -1 in", "expected float >= 0.0"]),
        ("[named]\na = {}\nb = 3", ["named.b = 3 in", "expected a table, got int"]),
        ("[amounts]\na = 1\nb = 'x'", ["amounts.b = 'x' in", "expected float, got str"]),
        ("[section\nsteps = 3", ["config.toml", "is not TOML", "line 1"]),
    ],
)
def test_errors_name_key_value_place(tmp_path: Path, text: str, parts: list[str]) -> None:
    with pytest.raises(SettingsError) as caught:
        load(Whole, write(tmp_path, text))
    for part in parts:
        assert part in str(caught.value)


def test_errors_name_the_source_that_set_the_value(tmp_path: Path) -> None:
    path = write(tmp_path, "[section]\nsteps = 3\n")
    with pytest.raises(SettingsError, match=r"section\.steps = 'x' in the arguments"):
        load(Whole, path, ["section.steps=x"])
    with pytest.raises(SettingsError, match=r"section\.steps = 'x' in the variable G__SECTION__STEPS"):
        load(Whole, path, prefix="G", environ={"G__SECTION__STEPS": "x"})
    with pytest.raises(SettingsError, match=r"section\.stps = 1 in the arguments: .*did you mean 'steps'"):
        load(Whole, path, ["section.stps=1"])
    with pytest.raises(SettingsError, match=r"section\.betas\[1\] = 'x' in the arguments"):
        load(Whole, path, ["section.betas=[0.9, 'x']"])
    with pytest.raises(SettingsError, match=r"named\.b\.weight = -1 in the arguments"):
        load(Whole, write(tmp_path, "[named.a]\nweight = 2\n"), ["named.b.weight=-1"])


def test_missing_file_and_missing_key(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"nowhere\.toml does not exist; give"):
        load(Whole, tmp_path / "nowhere.toml")
    with pytest.raises(SettingsError, match="needed is missing in"):
        load(Strict, write(tmp_path, ""))


def test_a_word_without_equals_is_refused() -> None:
    with pytest.raises(SettingsError, match=r"'steps' is not a setting; write section\.key=value"):
        load(Whole, overrides=["steps"])


def test_a_section_that_is_a_value_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"needed is the value 'x', not a section"):
        load(Whole, write(tmp_path, "needed = 'x'"), ["needed.deep=1"])
