"""Environments that converse with the policy, and tools that it may call (docs/environments.md)."""

from tba.environments.play import Play, open_play
from tba.environments.protocol import Agent, Environment, EpisodeError, Outcome, Policy, Reply, Reset, Step, ToolCall
from tba.environments.tools import Tool, ToolError, tool_of

__all__ = [
    "Agent",
    "Environment",
    "EpisodeError",
    "Outcome",
    "Play",
    "Policy",
    "Reply",
    "Reset",
    "Step",
    "Tool",
    "ToolCall",
    "ToolError",
    "open_play",
    "tool_of",
]
