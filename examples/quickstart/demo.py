"""The whole loop once, for real: `make demo`.

    tasks -> warm start -> evaluate -> train (rollouts, trees, TRL, publication) -> evaluate -> one JSON line

Killed at any point, the same command goes on where it was: everything is in the store and the output folder.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
sys.path.insert(0, str(HERE))

from gyre_sdk.errors import GyreError, WorkspaceError  # noqa: E402
from gyre_sdk.harness.workspace.engine import answers, shared_client, start_private_engine  # noqa: E402
from gyre_sdk.harness.workspace.sandboxes import build_sandbox  # noqa: E402
from gyre_sdk.trainer.main import quiet_libraries  # noqa: E402
from gyre_sdk.view import LiveView  # noqa: E402


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo; return the exit status."""
    arguments = _arguments(argv)
    quiet_libraries()
    try:
        print(json.dumps(_demo(arguments)))
    except GyreError as error:
        print(f"demo: {type(error).__name__}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("demo: stopped; run the same command again to go on", file=sys.stderr)
        return 130
    return 0


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0, help="of everything: tasks' order, warm start, training")
    parser.add_argument("--dir", type=Path, default=None, help="where everything goes; .gyre/quickstart/seed-N")
    parser.add_argument("--split", choices=["heldout", "validation"], default="heldout", help="tasks to evaluate on")
    parser.add_argument("--tasks", type=int, default=200, help="tasks per evaluation")
    parser.add_argument("--workspace", choices=["auto", "docker", "local"], default="auto")
    parser.add_argument("--plain", action="store_true", help="lines in place of the live view")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="any key of quickstart.toml")
    arguments = parser.parse_args(argv)
    if arguments.tasks < 1:
        parser.error(f"--tasks {arguments.tasks}: an evaluation needs one task at least")
    return arguments


def _demo(arguments: argparse.Namespace) -> dict[str, Any]:
    from warmstart import WarmStart, warm_start

    began = time.monotonic()
    folder = (arguments.dir or ROOT / ".gyre" / "quickstart" / f"seed-{arguments.seed}").resolve()
    policy = folder / "policy"
    with ExitStack() as cleanup:
        workspace = _workspace(arguments.workspace, cleanup)
        if not (policy / "config.json").is_file():
            warm_start(policy, WarmStart(seed=arguments.seed), cache=ROOT / ".cache" / "quickstart", progress=_say)
        figures = _loop(arguments, folder, policy, workspace)
        return {**figures, "minutes": round((time.monotonic() - began) / 60, 2), "store": str(folder / "store.db")}


def _loop(arguments: argparse.Namespace, folder: Path, policy: Path, workspace: str) -> dict[str, Any]:
    from loader import load

    from gyre_sdk.trainer.config import load_config
    from gyre_sdk.trainer.evaluation import evaluate
    from gyre_sdk.trainer.stack import Stack
    from gyre_sdk.trainer.training import train

    tasks = ROOT / ".gyre" / "quickstart" / "tasks"
    config = load_config(
        HERE / "quickstart.toml",
        [
            f"policy.model={policy}",
            f"store.path={folder / 'store.db'}",
            f"output.dir={folder / 'training'}",
            f"tasks.options.folder={tasks}",
            f"tasks.seed={arguments.seed}",
            f"train.seed={arguments.seed}",
            f"rollout.workspace={workspace}",
            *arguments.set,
        ],
    )
    held_out = load(str(tasks), arguments.split, arguments.tasks)
    with LiveView(plain=arguments.plain or None) as view, Stack(config, view, base=HERE) as stack:
        figures: dict[str, float] = {}
        for moment in ("before", "after"):
            if moment == "after":
                report = train(config, stack=stack)
            for name, temperature in (("success", 1.0), ("greedy", 0.0)):
                found = evaluate(config, held_out, name=f"{name}_{moment}", temperature=temperature, stack=stack)
                figures[f"{name}_{moment}"] = round(found.success, 4)
                if name == "success":
                    figures[f"reward_{moment}"] = round(found.reward, 4)
        counts = stack.journal.totals()
        return {
            **{key: figures[key] for key in sorted(figures, key=_order)},
            "runs": counts.runs,
            "calls": counts.calls,
            "sampled_tokens": counts.sampled_tokens,
            "trained_tokens": report.trained_tokens,
            "versions": report.versions,
        }


def _order(key: str) -> tuple[int, bool]:
    kind, _, moment = key.partition("_")
    return ("success", "greedy", "reward").index(kind), moment == "after"


def _workspace(asked: str, cleanup: ExitStack) -> str:
    """Return the kind of workspace to use, having made the engine and the image ready; never a silent fallback."""
    if asked == "local":
        _say("workspaces: local, as asked; tools run isolated as well as this machine allows, not in containers")
        return "local"
    if not answers():
        try:
            engine = start_private_engine(ROOT / ".gyre" / "docker")
        except WorkspaceError as error:
            if asked == "docker":
                raise
            _say(f"workspaces: LOCAL, no Docker engine answers and none can be started ({error})")
            return "local"
        cleanup.callback(engine.stop)
        os.environ["DOCKER_HOST"] = engine.url
        _say("workspaces: Docker, an engine of our own for the time of the demo")
    else:
        _say("workspaces: Docker")
    image = build_sandbox(shared_client(), "base")
    _say(f"sandbox: {image.name} is built")
    return "docker"


def _say(line: str) -> None:
    print(line, flush=True)


if __name__ == "__main__":
    sys.exit(main())
