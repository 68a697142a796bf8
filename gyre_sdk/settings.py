"""Settings: TOML, then the environment, then arguments, read once into a frozen struct.

`load` is the only place below the command line that reads the environment. Every error names the key, the value,
where it came from, and what would be right.

Sources, later ones win:

1. a TOML file;
2. variables `<PREFIX>__SECTION__KEY=value` (`GYRE_TRAIN__TRAIN__STEPS=3` for `train.steps`);
3. arguments `section.key=value`.

A value from 2 or 3 is read as TOML where it is TOML (`3`, `true`, `[1, 2]`), else as a string. A `Path` field that
is relative is resolved against the folder of the file.
"""

from __future__ import annotations

import difflib
import os
import re
import tomllib
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from gyre_sdk.errors import SettingsError

T = TypeVar("T", bound=msgspec.Struct)
SERVICE_KEY = "GYRE_SERVICE_KEY"
"""Variable that holds the key of a service's control API."""
REPLICA_TOKEN = "GYRE_REPLICA_TOKEN"
"""Variable that holds what replicas are sent as a bearer token."""
_ARGUMENTS = "the arguments"
_MISSING = object()
_WORDS = {" | null": "", "expected object": "expected a table", "got object": "got a table", "array": "list"}
"""What msgspec calls things -> what TOML does."""


def load(
    kind: type[T],
    path: Path | str | None = None,
    overrides: Mapping[str, Any] | Sequence[str] = (),
    *,
    prefix: str | None = None,
    environ: Mapping[str, str] | None = None,
) -> T:
    """Return a `kind` read from a file, the environment and arguments.

    Args:
        kind: a msgspec struct; nested structs are sections, `Annotated[..., msgspec.Meta]` gives ranges.
        path: TOML file, or None for defaults.
        overrides: `{"section.key": value}` or `["section.key=value", ...]`.
        prefix: of environment variables; None reads none.
        environ: the environment; None takes the process's.

    Raises:
        SettingsError: the file cannot be read, or a key or value is wrong.
    """
    file = Path(path) if path is not None else None
    data = _read(file) if file is not None else {}
    origin: dict[str, str] = {}
    if prefix is not None:
        for name, text in sorted((os.environ if environ is None else environ).items()):
            if name.startswith(f"{prefix}__"):
                key = name[len(prefix) + 2 :].lower().replace("__", ".")
                _set(data, key, _value(text), origin, f"the variable {name}")
    for key, value in _pairs(overrides):
        _set(data, key, value, origin, _ARGUMENTS)
    where = str(file) if file is not None else _ARGUMENTS
    _check_keys(kind, data, "", origin, where)
    base = file.resolve().parent if file is not None else Path.cwd()

    def decode(wanted: type, value: Any) -> Any:
        if wanted is Path:
            if not isinstance(value, str):
                raise ValueError(f"expected a path, got {type(value).__name__}")
            found = Path(value).expanduser()
            return found if found.is_absolute() else Path(os.path.normpath(base / found))
        raise NotImplementedError(wanted)

    try:
        return msgspec.convert(data, kind, dec_hook=decode)
    except msgspec.ValidationError as error:
        raise _explained(error, kind, data, origin, where, decode) from error


def _read(file: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(file.read_text("utf-8"))
    except FileNotFoundError:
        raise SettingsError(f"{file} does not exist; give the path of a TOML file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"{file} cannot be read: {error}; give the path of a TOML file") from error
    except tomllib.TOMLDecodeError as error:
        raise SettingsError(f"{file} is not TOML: {error}; correct that line") from error


def _pairs(overrides: Mapping[str, Any] | Sequence[str]) -> list[tuple[str, Any]]:
    if isinstance(overrides, Mapping):
        return list(overrides.items())
    pairs = []
    for text in overrides:
        key, equals, value = text.partition("=")
        if not equals or not key.strip():
            raise SettingsError(f"{text!r} is not a setting; write section.key=value, for example train.steps=10")
        pairs.append((key.strip(), _value(value)))
    return pairs


def _value(text: str) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def _set(data: dict[str, Any], key: str, value: Any, origin: dict[str, str], source: str) -> None:
    *sections, last = key.split(".")
    here = data
    for position, section in enumerate(sections):
        inner = here.setdefault(section, {})
        if not isinstance(inner, dict):
            above = ".".join(sections[: position + 1])
            raise SettingsError(
                f"{key} in {source}: {above} is the value {inner!r}, not a section; drop one of the two"
            )
        here = inner
    here[last] = value
    origin[key] = source


def _check_keys(kind: Any, data: Mapping[str, Any], above: str, origin: Mapping[str, str], where: str) -> None:
    """Refuse keys that no struct has; dictionaries typed as such take any key."""
    fields = {field.encode_name: field for field in msgspec.structs.fields(kind)}
    for key, value in data.items():
        path = f"{above}.{key}" if above else key
        if key not in fields:
            source = _source(path, origin, where)
            near = difflib.get_close_matches(key, fields, n=1, cutoff=0.5)
            known = f"did you mean {near[0]!r}?" if near else f"known keys: {', '.join(sorted(fields))}"
            raise SettingsError(f"{path} = {value!r} in {source}: there is no such key; {known}")
        for below, inner, part in _sections(fields[key].type, path, value):
            _check_keys(inner, part, below, origin, where)


def _sections(annotation: Any, path: str, value: Any) -> list[tuple[str, type[msgspec.Struct], Mapping[str, Any]]]:
    """Return the sections that a value is made of: itself, or those of a table of sections, each with path and struct."""
    if not isinstance(value, Mapping):
        return []
    if typing.get_origin(annotation) is dict:
        return [each for key, one in value.items() for each in _sections(_inner(annotation, ""), f"{path}.{key}", one)]
    inner = _struct(annotation)
    return [] if inner is None else [(path, inner, value)]


def _struct(annotation: Any) -> type[msgspec.Struct] | None:
    """Return the struct of an annotation `S`, `S | None` or `Annotated[S, ...]`."""
    if typing.get_origin(annotation) is typing.Annotated:
        return _struct(typing.get_args(annotation)[0])
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        found = [inner for inner in map(_struct, typing.get_args(annotation)) if inner is not None]
        return found[0] if found else None
    return annotation if isinstance(annotation, type) and issubclass(annotation, msgspec.Struct) else None


def _source(path: str, origin: Mapping[str, str], where: str) -> str:
    for key, source in origin.items():
        if path == key or path.startswith((f"{key}.", f"{key}[")) or key.startswith(f"{path}."):
            return source
    return where


def _explained(
    error: msgspec.ValidationError,
    kind: Any,
    data: Mapping[str, Any],
    origin: Mapping[str, str],
    where: str,
    decode: Callable[[type, Any], Any],
) -> SettingsError:
    """Turn msgspec's `Expected ..., got ... - at `$.a.b`` into a message that names the key and the value."""
    message, _, location = str(error).partition(" - at `$")
    message = message[:1].lower() + message[1:].replace("`", "")
    for word, own in _WORDS.items():
        message = message.replace(word, own)
    path, value, annotation = _followed(location.rstrip("`"), kind, data, decode)
    if message.startswith("object missing required field"):
        name = message.split()[-1]
        full = f"{path}.{name}" if path else name
        return SettingsError(f"{full} is missing in {where}; add it")
    if message.startswith("invalid enum value") and (words := _words(annotation)):
        message = f"expected {' or '.join(map(repr, words))}"
    shown = path if value is _MISSING or isinstance(value, Mapping) else f"{path} = {value!r}"
    return SettingsError(f"{shown or 'settings'} in {_source(path, origin, where)}: {message}; correct the value")


def _followed(location: str, kind: Any, data: Any, decode: Callable[[type, Any], Any]) -> tuple[str, Any, Any]:
    """Follow msgspec's `.a[1].b`, where `[...]` is some key of a table; return the path by its keys, what is there, its type."""
    path, annotation = "", kind
    for name, item in re.findall(r"\.(\w+)|\[(\d+|\.\.\.)\]", location):
        annotation = _inner(annotation, name)
        if item == "..." and isinstance(data, Mapping):
            name = next((key for key in data if not _converts(data[key], annotation, decode)), item)
        if item.isdigit():
            path += f"[{item}]"
            data = data[int(item)] if isinstance(data, list) and int(item) < len(data) else _MISSING
        else:
            path += f".{name}" if path else name
            data = data.get(name, _MISSING) if isinstance(data, Mapping) else _MISSING
    return path, data, annotation


def _inner(annotation: Any, name: str) -> Any:
    """Return the type of a struct's field; without a name, of what a table or list holds."""
    if name:
        struct = _struct(annotation)
        fields = {} if struct is None else {field.encode_name: field.type for field in msgspec.structs.fields(struct)}
        return fields.get(name)
    held = typing.get_args(annotation)
    return held[-1] if held else Any


def _converts(value: Any, annotation: Any, decode: Callable[[type, Any], Any]) -> bool:
    try:
        msgspec.convert(value, annotation, dec_hook=decode)
    except msgspec.ValidationError:
        return False
    return True


def _words(annotation: Any) -> list[str]:
    """Return what a type takes, where that is one of a few words."""
    of = typing.get_args(annotation)
    return [word for one in of for word in (typing.get_args(one) or [one]) if isinstance(word, str)]
