"""`gyre-train CONFIG.toml`: train, watching a live view; the same command again resumes.

Exit status: 0 done, 1 training could not go on, 2 the settings are wrong, 130 interrupted.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import warnings
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from gyre_sdk.errors import GyreError, SettingsError

if TYPE_CHECKING:
    from gyre_sdk.trainer.recovery import Recovery

DONE, FAILED, MISCONFIGURED, INTERRUPTED = 0, 1, 2, 130


def command(
    config: Annotated[Path, typer.Argument(help="TOML file; see the user guide for its keys.")],
    steps: Annotated[int | None, typer.Option(help="Train to this many steps; sets train.steps.")] = None,
    launcher: Annotated[
        str | None, typer.Option(metavar="local|ray", help="Where cells run; sets cells.launcher.")
    ] = None,
    set_: Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Set any key.")] = None,
    plain: Annotated[bool, typer.Option("--plain", help="Print lines in place of the live view.")] = False,
    json_: Annotated[bool, typer.Option("--json", help="Print the report as one JSON line at the end.")] = False,
    evaluate: Annotated[str | None, typer.Option(help="Evaluate under this name; do not train.")] = None,
) -> None:
    """Train the policy of a config on what its agent does; run it again to resume."""
    raise typer.Exit(_guarded(config, overrides(steps, launcher, set_), plain, json_, evaluate))


def overrides(steps: int | None, launcher: str | None, pairs: Sequence[str] | None) -> list[str]:
    """Return what options say of the settings, as `KEY=VALUE`; those that name their key come last."""
    named = {"train.steps": steps, "cells.launcher": launcher}
    return [*(pairs or ()), *(f"{key}={value}" for key, value in named.items() if value is not None)]


def _guarded(config: Path, pairs: list[str], plain: bool, as_json: bool, evaluation: str | None) -> int:
    try:
        return _run(config, pairs, plain, as_json, evaluation)
    except SettingsError as error:
        sys.stderr.write(f"gyre-train: {error}\n")
        return MISCONFIGURED
    except GyreError as error:
        sys.stderr.write(f"gyre-train: {type(error).__name__}: {error}\n")
        return FAILED
    except KeyboardInterrupt:
        sys.stderr.write("gyre-train: stopped; run the same command again to resume\n")
        return INTERRUPTED


def _run(path: Path, pairs: list[str], plain: bool, as_json: bool, evaluation: str | None) -> int:
    from gyre_sdk.trainer.config import load_config

    config = load_config(path, pairs)
    from gyre_sdk.trainer.purpose import check_packages, check_purpose
    from gyre_sdk.trainer.team import follow, join, place

    check_packages()
    quiet_libraries()
    where = place(os.environ)
    check_purpose(config, evaluation, processes=where.size)
    ranks = join(where) if where.size > 1 else None
    if ranks is not None and not ranks.leads:
        follow(config, ranks)
        return DONE
    from gyre_sdk.trainer.evaluation import evaluate
    from gyre_sdk.trainer.recovery import recover
    from gyre_sdk.trainer.stack import Stack

    report: msgspec.Struct
    if not as_json:
        sys.stdout.write(f"starting; the processes of this training write to {config.output.dir / 'logs'}\n")
        sys.stdout.flush()
    with ExitStack() as cleanup:
        try:
            observer = cleanup.enter_context(_view(plain))
            stack = cleanup.enter_context(
                Stack(config, observer, base=path.resolve().parent, trains=evaluation is None)
            )
        except BaseException as error:
            if ranks is not None:
                ranks.fail(f"{type(error).__name__}: {error}")
            raise
        if evaluation is None:
            from gyre_sdk.trainer.anew import watched
            from gyre_sdk.trainer.training import train

            with watched(stack, where.size):
                report = train(config, stack=stack, ranks=ranks)
        else:
            report = evaluate(config, stack.tasks, name=evaluation, stack=stack)
    if as_json:
        sys.stdout.write(json.dumps(msgspec.to_builtins(report)) + "\n")
    elif evaluation is None:
        sys.stdout.write(f"{_outcome(recover(stack.ledger.state), config.store.path)}\n")
    return DONE


def _outcome(state: Recovery, store: Path) -> str:
    """Return where a training stands, where its policy is, and how to look at it."""
    policy = "" if state.checkpoint is None else f", and the policy is in {state.checkpoint.path}"
    return f"trained to step {state.step}{policy}; look at it with: gyre report {store} --out report.html"


def quiet_libraries() -> None:
    """Keep libraries offline and off the terminal, before they are first imported."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    for name in ("transformers", "trl", "accelerate", "httpx"):
        logging.getLogger(name).setLevel(logging.ERROR)
    theirs = r"(accelerate|datasets|peft|transformers|trl)\b"
    warnings.filterwarnings(
        "ignore", category=FutureWarning, module=theirs
    )  # of one to another: users cannot act on it


def _view(plain: bool) -> AbstractContextManager[Any]:
    from gyre_sdk.view import LiveView

    return LiveView(plain=True) if plain else LiveView()


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; return the exit status."""
    before = signal.signal(signal.SIGTERM, _interrupt)
    try:
        application()(args=None if argv is None else list(argv), prog_name="gyre-train")
    except SystemExit as done:
        return done.code if isinstance(done.code, int) else DONE
    finally:
        signal.signal(signal.SIGTERM, before)
    return DONE


def application() -> typer.Typer:
    """Return the command line."""
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(command)
    return app


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
