"""What known agent programs need to work through the recording proxy: command line, variables, files. Pure.

Each is as its program was recorded (see `proxy.lanes.presets`): no telemetry, no updates, no questions.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from gyre_sdk.errors import SettingsError

DUMMY_KEY = "gyre"
"""Key of a program inside a workspace: the listener there knows who calls, the real key stays outside."""


@dataclass(frozen=True, slots=True)
class Access:
    """How a program reaches the model."""

    base_url: str
    """OpenAI base URL, ending in `/v1`, as the program sees it."""
    api_key: str
    model: str
    """Name of the model that the program asks for."""
    home: str
    """Folder of its own for the program's settings, absolute, as the program sees it."""

    @property
    def root(self) -> str:
        """Base URL of Anthropic's clients: they add `/v1` themselves."""
        return self.base_url.removesuffix("/v1")


def _no_files(access: Access) -> Mapping[str, str]:
    return {}


@dataclass(frozen=True, slots=True)
class Preset:
    """A known program."""

    name: str
    classifier: str
    """Tells its lanes apart; see `gyre.session`."""
    programs: tuple[str, ...]
    """Names of its executable."""
    command: Callable[[Access, str, Sequence[str]], list[str]]
    """Command line for an instruction, with further arguments."""
    variables: Callable[[Access], Mapping[str, str]]
    files: Callable[[Access], Mapping[str, str]] = field(default=_no_files)
    """Path below `Access.home` -> content."""
    unset: tuple[str, ...] = ()
    """Variables that would lead it elsewhere."""


def _claude_code_command(access: Access, instruction: str, more: Sequence[str]) -> list[str]:
    return ["claude", "-p", "--dangerously-skip-permissions", "--model", access.model, *more, "--", instruction]


def _claude_code_variables(access: Access) -> Mapping[str, str]:
    return {
        "ANTHROPIC_BASE_URL": access.root,
        "ANTHROPIC_AUTH_TOKEN": access.api_key,
        "ANTHROPIC_MODEL": access.model,
        "ANTHROPIC_SMALL_FAST_MODEL": access.model,
        "ANTHROPIC_DEFAULT_HAIKU_MODEL": access.model,
        "CLAUDE_CONFIG_DIR": f"{access.home}/.claude",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "DISABLE_AUTOUPDATER": "1",
        "DISABLE_TELEMETRY": "1",
        "DISABLE_ERROR_REPORTING": "1",
        "IS_SANDBOX": "1",
    }


CLAUDE_CODE = Preset(
    name="claude-code",
    classifier="claude-code",
    programs=("claude",),
    command=_claude_code_command,
    variables=_claude_code_variables,
    unset=("ANTHROPIC_API_KEY", "CLAUDE_CODE_USE_BEDROCK", "CLAUDE_CODE_USE_VERTEX", "CLAUDE_CODE_OAUTH_TOKEN"),
)
"""Claude Code, `claude -p`."""


def _codex_command(access: Access, instruction: str, more: Sequence[str]) -> list[str]:
    fixed = ["codex", "exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox"]
    return [*fixed, *more, "--", instruction]


def _codex_files(access: Access) -> Mapping[str, str]:
    settings = (
        f"model = {json.dumps(access.model)}\n"
        'model_provider = "gyre"\n'
        "check_for_update_on_startup = false\n"
        "[analytics]\nenabled = false\n"
        "[model_providers.gyre]\n"
        'name = "gyre"\n'
        f"base_url = {json.dumps(access.base_url)}\n"
        'env_key = "GYRE_KEY"\n'
        'wire_api = "responses"\n'
    )
    return {".codex/config.toml": settings}


CODEX = Preset(
    name="codex",
    classifier="codex",
    programs=("codex",),
    command=_codex_command,
    variables=lambda access: {"CODEX_HOME": f"{access.home}/.codex", "GYRE_KEY": access.api_key},
    files=_codex_files,
)
"""Codex, `codex exec`."""


def _mini_command(access: Access, instruction: str, more: Sequence[str]) -> list[str]:
    fixed = ["mini", "--yolo", "--exit-immediately", "--model", f"openai/{access.model}"]
    return [*fixed, "--output", f"{access.home}/trajectory.json", *more, f"--task={instruction}"]


def _mini_variables(access: Access) -> Mapping[str, str]:
    return {
        "OPENAI_API_BASE": access.base_url,
        "OPENAI_API_KEY": access.api_key,
        "MSWEA_CONFIGURED": "true",
        "MSWEA_COST_TRACKING": "ignore_errors",
        "MSWEA_SILENT_STARTUP": "1",
        "MSWEA_GLOBAL_CONFIG_DIR": f"{access.home}/.config",
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    }


MINI_SWE_AGENT = Preset(
    name="mini-swe-agent",
    classifier="mini-swe-agent",
    programs=("mini", "mini-swe-agent"),
    command=_mini_command,
    variables=_mini_variables,
)
"""mini-swe-agent, `mini`; it speaks through LiteLLM."""


def _generic_command(access: Access, instruction: str, more: Sequence[str]) -> list[str]:
    raise SettingsError(
        "there is no command to run; give one after --, or name a program: --agent claude-code, codex or mini-swe-agent"
    )


def _generic_variables(access: Access) -> Mapping[str, str]:
    return {
        "OPENAI_BASE_URL": access.base_url,
        "OPENAI_API_BASE": access.base_url,
        "OPENAI_API_KEY": access.api_key,
        "OPENAI_AGENTS_DISABLE_TRACING": "1",
        "ANTHROPIC_BASE_URL": access.root,
        "ANTHROPIC_API_KEY": access.api_key,
    }


GENERIC = Preset(
    "generic", "auto", (), _generic_command, _generic_variables, unset=("ANTHROPIC_AUTH_TOKEN", "OPENAI_ORG_ID")
)
"""Any program that reads the variables of the SDKs of OpenAI or Anthropic."""

PRESETS = {preset.name: preset for preset in (CLAUDE_CODE, CODEX, MINI_SWE_AGENT, GENERIC)}


def preset_of(name: str | None, command: Sequence[str]) -> Preset:
    """Return the preset of a name, or else of the program that a command starts.

    Raises:
        SettingsError: there is no such preset, or neither a name nor a command is given.
    """
    if name is not None:
        if name not in PRESETS:
            raise SettingsError(f"--agent {name!r} is not known; give one of {', '.join(PRESETS)}")
        return PRESETS[name]
    if not command:
        return GENERIC
    program = command[0].rpartition("/")[2]
    return next((preset for preset in PRESETS.values() if program in preset.programs), GENERIC)


def command_line(preset: Preset, access: Access, instruction: str, command: Sequence[str]) -> list[str]:
    """Return what to run.

    Args:
        command: what the user gave. What begins with an option goes to the preset's own command; else it is run as it
            is, `{instruction}` replaced by the instruction.

    Raises:
        SettingsError: there is nothing to run.
    """
    if command and not command[0].startswith("-"):
        return [part.replace("{instruction}", instruction) for part in command]
    return preset.command(access, instruction, command)
