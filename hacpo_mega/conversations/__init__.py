"""Conversations of several turns: an agent's own, and between them what tools, an environment or other agents say.

`Responder` is the base of an environment class that answers turns without a tool call, `AgentProgram` of one that plays
conversations itself, over HTTP. The room is imported by the processes that run such classes, so nothing heavy is
imported here.
"""

from hacpo_mega.conversations.environment_process import AgentProgram, Responder

__all__ = ["AgentProgram", "Responder"]
