"""Clients of the services: synchronous, safe to share between threads."""

from tba.clients.buffer import BufferClient
from tba.clients.service_client import RewardClient
