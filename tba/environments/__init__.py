"""Environments that converse with the policy, and tools that it may call (docs/environments.md)."""

from tba.environments.play import Play, open_play
from tba.environments.protocol import Environment, EpisodeError, Reply, Reset, Step, ToolCall
from tba.environments.tools import Tool, ToolError, tool_of

__all__ = [
    "Environment",
    "EpisodeError",
    "Play",
    "Reply",
    "Reset",
    "Step",
    "Tool",
    "ToolCall",
    "ToolError",
    "open_play",
    "tool_of",
]
