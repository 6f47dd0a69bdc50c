"""Score with neural networks: each distinct set of models runs in a child process of its own.

    scorer --score--> ModelProcess ==frames on a pipe==> tba_reward.model_server.child (torch, transformers)

The service itself never imports torch: it starts the child, watches it, kills it and starts it again.
"""
