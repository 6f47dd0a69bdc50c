"""Scores that need a neural network: each distinct set of models lives in one process of its own.

    scorer --ask--> ModelProcess ==frames on a pipe==> tba_reward.models.child (torch, transformers)

The service itself never imports torch: it starts the child, watches it, kills it and starts it again.
"""
