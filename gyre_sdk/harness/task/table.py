"""A table of a TOML file that names file and key when a value is wrong."""

from __future__ import annotations

import math
import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gyre_sdk.errors import TaskError

VARIABLE = re.compile(r"\$\{([A-Za-z_]\w*)(?::?-([^}]*))?\}")


@dataclass(frozen=True, slots=True)
class Table:
    """One table: its getters check the type of a value and name the place of a wrong one."""

    file: Path
    prefix: str
    """Dotted name of the table with a dot at the end; empty for the file's root."""
    values: Mapping[str, Any]
    variables: Mapping[str, str] = field(default_factory=dict)
    """Values for `${NAME}`, given by the caller: the host's environment is never read."""

    @classmethod
    def read(cls, file: Path, variables: Mapping[str, str] | None = None) -> Table:
        """Return the root table of a file.

        Raises:
            TaskError: it is missing or no TOML.
        """
        try:
            return cls(file, "", tomllib.loads(file.read_text("utf-8")), variables or {})
        except FileNotFoundError:
            raise TaskError(
                f"{file} is missing; a task folder has task.toml, instruction.md, environment/, tests/"
            ) from None
        except tomllib.TOMLDecodeError as error:
            raise TaskError(f"{file} is not TOML: {error}; correct that line") from error
        except (OSError, UnicodeDecodeError) as error:
            raise TaskError(f"{file} cannot be read: {error}; make it a readable UTF-8 file") from error

    def wrong(self, key: str, expected: str) -> TaskError:
        """Return the error for a value."""
        return TaskError(f"{self.file}: {self.prefix}{key} = {self.values.get(key)!r} is wrong; expected {expected}")

    def refused(self, key: str, instead: str) -> TaskError:
        """Return the error for what the format has and gyre has not."""
        return TaskError(f"{self.file}: {self.prefix}{key} = {self.values.get(key)!r} is not supported; {instead}")

    def table(self, key: str) -> Table:
        """Return a table; an empty one where there is none."""
        value = self.values.get(key, {})
        if not isinstance(value, dict):
            raise self.wrong(key, f"a table [{self.prefix}{key}]")
        return Table(self.file, f"{self.prefix}{key}.", value, self.variables)

    def tables(self, key: str) -> Iterator[Table]:
        """Yield the tables of an array of tables."""
        value = self.values.get(key, [])
        if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
            raise self.wrong(key, f"an array of tables [[{self.prefix}{key}]]")
        for number, item in enumerate(value):
            yield Table(self.file, f"{self.prefix}{key}[{number}].", item, self.variables)

    def text(self, key: str) -> str | None:
        """Return a string."""
        value = self.values.get(key)
        if value is not None and not isinstance(value, str):
            raise self.wrong(key, "a string")
        return value

    def choice(self, key: str, *known: str) -> str | None:
        """Return one of the known strings."""
        value = self.text(key)
        if value is not None and value not in known:
            raise self.wrong(key, f"one of {', '.join(known)}")
        return value

    def flag(self, key: str) -> bool | None:
        """Return true or false."""
        value = self.values.get(key)
        if value is not None and not isinstance(value, bool):
            raise self.wrong(key, "true or false")
        return value

    def user(self, key: str) -> str | None:
        """Return the name or number of a user."""
        value = self.values.get(key)
        if isinstance(value, int) and not isinstance(value, bool):
            return str(value)
        return self.text(key)

    def number(self, key: str, default: float) -> float:
        """Return a number above 0."""
        value = self.optional(key)
        return default if value is None else value

    def optional(self, key: str, *, least: float | None = None) -> float | None:
        """Return a number above 0 (or from `least` on), or None where there is none."""
        value = self.values.get(key)
        if value is None:
            return None
        small = isinstance(value, int | float) and (value <= 0 if least is None else value < least)
        if isinstance(value, bool) or not isinstance(value, int | float) or small or not math.isfinite(value):
            raise self.wrong(key, "a number above 0" if least is None else f"a number of {least:g} or more")
        return float(value)

    def strings(self, key: str) -> dict[str, str]:
        """Return a table of strings; `${NAME}` is the caller's variable, `${NAME:-default}` also the default."""
        table = self.table(key)
        for name, value in table.values.items():
            if not isinstance(value, str):
                raise table.wrong(name, "a string")
        return {name: table.resolved(name, value) for name, value in table.values.items()}

    def resolved(self, key: str, text: str) -> str:
        """Return a text with its variables replaced."""

        def value(match: re.Match[str]) -> str:
            name, default = match.groups()
            if name not in self.variables and default is None:
                raise self.wrong(
                    key,
                    f"a literal: variables of the host are not passed into workspaces; give {name} by name"
                    f" (Task.load(folder, variables={{{name!r}: ...}}), or --set {name}=VALUE)",
                )
            return self.variables.get(name, default or "")

        return VARIABLE.sub(value, text)

    def texts(self, key: str) -> tuple[str, ...]:
        """Return an array of strings."""
        value = self.values.get(key, [])
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self.wrong(key, "an array of strings")
        return tuple(value)

    def only(self, *known: str) -> None:
        """Refuse every other key."""
        for key in self.values:
            if key not in known:
                raise self.wrong(key, f"one of the keys {', '.join(known)}")
