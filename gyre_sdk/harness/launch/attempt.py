"""One run whose agent is a program: a session, the program in it, its exit code and reward."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import Literal

from gyre_sdk.errors import AgentFailed, GyreError, SettingsError
from gyre_sdk.harness.agent import Agent
from gyre_sdk.harness.hooks import Hooks, RunEnd, RunStart
from gyre_sdk.harness.launch.host import require_here, run_here
from gyre_sdk.harness.launch.inside import HOME, run_inside
from gyre_sdk.harness.launch.outlet import Stream
from gyre_sdk.harness.launch.presets import DUMMY_KEY, Access, Preset, command_line
from gyre_sdk.harness.limits import Limits
from gyre_sdk.harness.service import ServiceClient
from gyre_sdk.harness.session import Session
from gyre_sdk.harness.task import Task
from gyre_sdk.records import RunResult

_LONG = 100_000
"""Bytes of an instruction above which it is in a file only: the system takes no longer variable."""


class Where(StrEnum):
    """Where the program runs."""

    INSIDE = "inside"
    """In the workspace, where its tools act on what is scored."""
    HOST = "host"
    """On this machine, with all that it may reach here."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What is done once for each run."""

    task: Task
    preset: Preset
    command: tuple[str, ...] = ()
    """As `presets.command_line` takes it."""
    where: Where = Where.INSIDE
    model: str = "policy"
    """Name of the model that the program asks for."""
    variables: Mapping[str, str] = field(default_factory=dict)
    """Further environment of the program."""
    limits: Limits = field(default_factory=Limits)
    workspace: Literal["docker", "local", "auto"] = "docker"
    group: str | None = None
    split: str = "run"


@dataclass(slots=True)
class Attempt:
    """What came of one run."""

    member: int
    run: str | None = None
    """None: it was never put on record."""
    exit_code: int | None = None
    """Of the program; None where it did not get to its end."""
    end: RunEnd | None = None
    result: RunResult | None = None
    """None where the block never began."""
    error: str | None = None
    """What kept the run from its end, where that was not the agent."""


def check_plan(plan: Plan) -> None:
    """Refuse what cannot work for any run, before one is made.

    Raises:
        SettingsError: there is nothing to run, or its program is not on this machine.
    """
    line = command_line(plan.preset, Access("", "", plan.model, HOME), plan.task.instruction, plan.command)
    if plan.where is Where.HOST:
        require_here(line[0])
    elif plan.workspace == "local":
        raise SettingsError("no agent can be put into a local workspace; use --workspace docker, or --host")


def attempt(
    plan: Plan,
    member: int,
    service: ServiceClient,
    show: Stream,
    check: Callable[[], None],
    begun: Callable[[str], None],
) -> Attempt:
    """Run the program once, from the run's record to its end.

    Args:
        show: gets the program's output.
        check: is called while it runs; what it raises (a `KeyboardInterrupt`) cancels the run.
        begun: is told the run's id once it is on record.
    """
    made = Attempt(member)

    def started(start: RunStart) -> None:
        made.run = start.run
        begun(start.run)

    def ended(end: RunEnd) -> None:
        made.end = end

    session = Session(
        plan.task,
        service=service,
        workspace=plan.workspace,
        group=plan.group,
        member=member,
        split=plan.split,
        classifier=plan.preset.classifier,
        limits=plan.limits,
        hooks=Hooks(RunStart=started, RunEnd=ended),
        metadata={"agent": plan.preset.name, "where": plan.where.value},
    )
    agent: Agent | None = None
    try:
        check()
        with session as agent:
            for step in agent.steps():
                until = time.monotonic() + step.agent_timeout_s if plan.task.steps and step.agent_timeout_s else None
                try:
                    made.exit_code = _program(replace(plan, task=step), member, agent, show, check, until)
                except _StepOver:
                    continue  # what it did until then is scored, and says whether there is a next step
                if made.exit_code != 0:
                    raise AgentFailed(made.exit_code)
    except AgentFailed:
        pass
    except KeyboardInterrupt:
        made.error = "cancelled"
    except GyreError as error:
        made.error = " ".join(str(error).split())
    finally:
        show.close()
    if agent is not None and made.end is not None:
        made.result = agent.result
    return made


class _StepOver(Exception):
    """The program ran past the time limit of its step. Internal."""


def _program(
    plan: Plan, member: int, agent: Agent, show: Stream, check: Callable[[], None], until: float | None
) -> int:
    """Run the program to its end; return its exit code.

    Args:
        until: monotonic time of its step's end; None where there are no steps.
    """

    def may_go_on() -> None:
        check()
        agent.context.meter.check(agent.lane)
        if until is not None and time.monotonic() > until:
            raise _StepOver

    may_go_on()
    if plan.where is Where.INSIDE:
        return run_inside(
            agent,
            lambda base_url: _start(plan, member, agent, Access(base_url, DUMMY_KEY, plan.model, HOME)),
            show=show,
            check=may_go_on,
        )
    with tempfile.TemporaryDirectory(prefix="gyre-agent-") as home:
        start = _start(plan, member, agent, Access(agent.base_url, agent.api_key, plan.model, home))
        for name, content in start.files.items():
            path = Path(home, name)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(content, "utf-8")
        return run_here(start.command, variables=start.variables, unset=plan.preset.unset, show=show, check=may_go_on)


@dataclass(frozen=True, slots=True)
class Start:
    """What a program is started with."""

    command: list[str]
    variables: Mapping[str, str]
    files: Mapping[str, str]
    """Path below the program's home -> content."""


def _start(plan: Plan, member: int, agent: Agent, access: Access) -> Start:
    instruction = plan.task.instruction
    about = {
        "GYRE_RUN": agent.run,
        "GYRE_MEMBER": str(member),
        "GYRE_TASK": plan.task.name,
        "GYRE_WORKSPACE": agent.workspace.id,
        "GYRE_MODEL": access.model,
        "GYRE_INSTRUCTION_FILE": f"{access.home}/instruction.md",
        **({"GYRE_INSTRUCTION": instruction} if len(instruction.encode()) < _LONG else {}),
    }
    return Start(
        command_line(plan.preset, access, instruction, plan.command),
        {**about, **plan.preset.variables(access), **plan.variables},
        {"instruction.md": instruction, **plan.preset.files(access)},
    )
