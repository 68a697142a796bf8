"""Real agent programs, installed once into a cache folder and run without a terminal against any base URL.

The folder is `$GYRE_CLIENTS`, else `~/.cache/gyre/clients`; each version has a folder of its own below it. Where a
program cannot be installed, the test skips and says what is missing; with `CI` set it fails.
"""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import pytest

HERE = Path(__file__).parent
CLAUDE_CODE = "2.1.197"
CODEX = "0.171.0"
MINI_SWE_AGENT = "2.4.6"
OPENAI_AGENTS = "0.24.0"

INSTALL_SECONDS = 200


@dataclass(frozen=True)
class Ended:
    """How a program ended."""

    code: int | None
    """Exit status; None when its time was up and it was killed."""
    output: str
    """Standard output and error, together."""


@dataclass(frozen=True)
class Launch:
    """One start of a program: what it runs, and with which environment."""

    command: Sequence[str]
    environment: Mapping[str, str]
    files: Mapping[Path, str] = field(default_factory=dict)
    """Written before the start."""


@dataclass(frozen=True)
class Program:
    """An installed program."""

    name: str
    launch: Callable[[Request], Launch]

    async def run(
        self,
        base_url: str,
        key: str,
        workspace: Path,
        prompt: str,
        *,
        model: str = "scripted",
        seconds: float = 120.0,
        arguments: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
    ) -> Ended:
        """Run it once in a folder, until it ends or its time is up.

        `base_url` has no `/v1` at its end. The program's home is `.home` beside the workspace, so a second run in the
        same workspace can continue the first one's session. The program sees no environment but what it needs.
        """
        home = workspace.parent / f"{workspace.name}.home"
        home.mkdir(exist_ok=True)
        start = self.launch(Request(base_url.rstrip("/"), key, workspace, home, prompt, model, tuple(arguments)))
        for path, text in start.files.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        plain = {"PATH": os.environ["PATH"], "HOME": str(home), "TERM": "dumb", "LANG": "C.UTF-8", "TZ": "UTC"}
        process = await asyncio.create_subprocess_exec(
            *start.command,
            cwd=workspace,
            env={**plain, **start.environment, **(environment or {})},
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            async with asyncio.timeout(seconds):
                output, _ = await process.communicate()
            return Ended(process.returncode, output.decode(errors="replace"))
        except TimeoutError:
            return Ended(None, f"{self.name} did not end within {seconds:g} s")
        finally:
            _end_group(process.pid)
            await process.wait()


@dataclass(frozen=True)
class Request:
    """What a start is made from."""

    base_url: str
    key: str
    workspace: Path
    home: Path
    prompt: str
    model: str
    arguments: tuple[str, ...]


# -- the programs -----------------------------------------------------------------------------------------------------


@cache
def claude_code() -> Program:
    """Return Claude Code, run with `claude -p`."""
    binary = installed_claude_code() / "node_modules/.bin/claude"

    def launch(asked: Request) -> Launch:
        command = [str(binary), "-p", "--dangerously-skip-permissions", "--model", asked.model, *asked.arguments]
        environment = {
            "ANTHROPIC_BASE_URL": asked.base_url,
            "ANTHROPIC_AUTH_TOKEN": asked.key,
            "ANTHROPIC_SMALL_FAST_MODEL": asked.model,
            "ANTHROPIC_DEFAULT_HAIKU_MODEL": asked.model,
            "CLAUDE_CONFIG_DIR": str(asked.home / ".claude"),
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
            "DISABLE_AUTOUPDATER": "1",
            "DISABLE_TELEMETRY": "1",
            "DISABLE_ERROR_REPORTING": "1",
            "IS_SANDBOX": "1",
        }
        return Launch([*command, asked.prompt], environment)

    return Program("claude_code", launch)


@cache
def codex() -> Program:
    """Return Codex, run with `codex exec`."""
    binary = installed_codex() / "node_modules/.bin/codex"

    def launch(asked: Request) -> Launch:
        folder = asked.home / ".codex"
        config = (
            f"model = {json.dumps(asked.model)}\n"
            'model_provider = "gyre"\n'
            "check_for_update_on_startup = false\n"
            "[analytics]\nenabled = false\n"
            "[model_providers.gyre]\n"
            'name = "gyre"\n'
            f"base_url = {json.dumps(asked.base_url + '/v1')}\n"
            'env_key = "GYRE_KEY"\n'
            'wire_api = "responses"\n'
        )
        command = [str(binary), "exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox"]
        environment = {"CODEX_HOME": str(folder), "GYRE_KEY": asked.key}
        return Launch([*command, *asked.arguments, asked.prompt], environment, {folder / "config.toml": config})

    return Program("codex", launch)


@cache
def mini_swe_agent() -> Program:
    """Return mini-swe-agent, run with `mini`; it speaks through LiteLLM."""
    binary = _pip("mini-swe-agent", MINI_SWE_AGENT) / "bin/mini"

    def launch(asked: Request) -> Launch:
        command = [str(binary), "--yolo", "--exit-immediately", "--model", f"openai/{asked.model}"]
        environment = {
            "OPENAI_API_BASE": asked.base_url + "/v1",
            "OPENAI_API_KEY": asked.key,
            "MSWEA_CONFIGURED": "true",
            "MSWEA_COST_TRACKING": "ignore_errors",
            "MSWEA_SILENT_STARTUP": "1",
            "MSWEA_GLOBAL_CONFIG_DIR": str(asked.home / ".config"),
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        }
        output = asked.home / "trajectory.json"
        return Launch([*command, "--output", str(output), "--task", asked.prompt, *asked.arguments], environment)

    return Program("mini_swe_agent", launch)


@cache
def openai_agents() -> Program:
    """Return a small program on openai-agents: a triage agent, a hand-off, an agent used as a tool."""
    python = _pip("openai-agents", OPENAI_AGENTS) / "bin/python"

    def launch(asked: Request) -> Launch:
        environment = {
            "OPENAI_BASE_URL": asked.base_url + "/v1",
            "OPENAI_API_KEY": asked.key,
            "OPENAI_AGENTS_DISABLE_TRACING": "1",
        }
        command = [str(python), str(HERE / "agents_program.py"), asked.model, asked.prompt, *asked.arguments]
        return Launch(command, environment)

    return Program("openai_agents", launch)


def python_of(package: str, version: str) -> Path:
    """Return the interpreter of an environment that holds one package, installed on first use."""
    return _pip(package, version) / "bin/python"


def installed_claude_code() -> Path:
    """Return the folder that Claude Code is installed in."""
    return _npm("@anthropic-ai/claude-code", CLAUDE_CODE)


def installed_codex() -> Path:
    """Return the folder that Codex is installed in."""
    return _npm("@openai/codex", CODEX)


# -- installing -------------------------------------------------------------------------------------------------------


def _npm(package: str, version: str) -> Path:
    if shutil.which("npm") is None:
        _missing(f"{package} {version}", "npm is not installed (Debian: apt-get install nodejs npm)")

    def install(folder: Path) -> None:
        _check(["npm", "install", "--no-fund", "--no-audit", "--prefix", str(folder), f"{package}@{version}"])

    return _installed(package, version, install)


def _pip(package: str, version: str) -> Path:
    def install(folder: Path) -> None:
        _check([sys.executable, "-m", "venv", "--without-pip", str(folder)])
        pip = [sys.executable, "-m", "pip", "--python", str(folder / "bin/python"), "install", "-qq", "--no-compile"]
        _check([*pip, "--disable-pip-version-check", f"{package}=={version}"])

    return _installed(package, version, install)


def _installed(package: str, version: str, install: Callable[[Path], None]) -> Path:
    """Return the folder of a package. Installs it where that was not done whole; one process at a time."""
    root = Path(os.environ.get("GYRE_CLIENTS") or Path.home() / ".cache/gyre/clients")
    name = f"{package.rpartition('/')[2]}-{version}"
    folder = root / name
    root.mkdir(parents=True, exist_ok=True)
    with (root / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if (folder / "ready").exists():
            return folder
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        try:
            install(folder)
        except (OSError, subprocess.SubprocessError) as error:
            _missing(f"{package} {version}", f"it could not be installed: {_said(error)}")
        (folder / "ready").touch()
    return folder


def _check(command: Sequence[str]) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True, timeout=INSTALL_SECONDS)


def _said(error: Exception) -> str:
    output = getattr(error, "stderr", None) or getattr(error, "stdout", None) or str(error)
    return str(output).strip()[-500:]


def _missing(what: str, why: str) -> None:
    message = f"{what} is missing: {why}"
    if os.environ.get("CI"):
        pytest.fail(message)
    pytest.skip(message)


def _end_group(pid: int) -> None:
    try:
        os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError:
        return
