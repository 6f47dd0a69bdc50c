"""Rollouts: accept a push, answer queries, and rebuild what a lost payload held."""
