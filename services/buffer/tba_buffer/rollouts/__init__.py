"""Rollouts: accept pushes, answer queries and exports, and report lost or damaged payloads."""
