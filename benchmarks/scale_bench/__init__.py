"""The parts of benchmarks/scale.py: a fleet of simulated searchers against real services.

plan.py (who joins, leaves and vanishes when) -> fleet.py (runs it) -> verdict.py (what must be true afterwards)
    services.py      Redis, buffer, reward service, prompts: real processes
    trainer.py       draws, acks and publishes like a trainer, without a model
    host.py          a process with many searchers in one event loop; hosts.py: its end in this process
    watch.py         looks at GET /v1/run while it goes on
"""
