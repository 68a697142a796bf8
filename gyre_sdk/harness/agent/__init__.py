"""What the user's block is given: lanes with model access, tools and budgets of their own, and the run's score."""

from gyre_sdk.harness.agent.context import RunContext
from gyre_sdk.harness.agent.lane import Agent, Lane
from gyre_sdk.harness.agent.meter import Meter
from gyre_sdk.harness.agent.waiting import in_thread, to_the_end

__all__ = ["Agent", "Lane", "Meter", "RunContext", "in_thread", "to_the_end"]
