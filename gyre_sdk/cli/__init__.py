"""The command `gyre`: ask a store, watch it, serve models to agents, look after workspaces.

The commands load when one is asked for: a Ctrl-C while they load ends `gyre` as quietly as any later one.
"""

from __future__ import annotations

import errno
import importlib
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from gyre_sdk.errors import GyreError

if TYPE_CHECKING:
    from gyre_sdk.cli.commands import app

__all__ = ["app", "main"]

ERROR = 2
"""Exit status when gyre itself says what is wrong."""
_INTERRUPTED = 130
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)


def __getattr__(name: str) -> Any:
    if name == "app":
        return importlib.import_module("gyre_sdk.cli.commands").app
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def main(argv: Sequence[str] | None = None) -> None:
    """Run a command and exit; an error of gyre is one line on standard error and exit status 2."""
    try:
        commands: Any = importlib.import_module("gyre_sdk.cli.commands")
        commands.app(args=None if argv is None else list(argv), prog_name="gyre")
    except GyreError as error:
        sys.stderr.write(f"gyre: {' '.join(str(error).split())}\n")
        sys.exit(ERROR)
    except OSError as error:
        if error.errno not in _NO_ROOM:
            raise
        sys.stderr.write(f"gyre: {error.strerror}: {error.filename or 'where its output goes'}; make room there\n")
        sys.exit(ERROR)
    except KeyboardInterrupt:
        sys.exit(_INTERRUPTED)
