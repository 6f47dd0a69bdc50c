"""Clients of the services: synchronous, safe to share between threads."""

from tba.clients.buffer import BufferClient
from tba.clients.http import RewardClient

__all__ = ["BufferClient", "RewardClient"]
