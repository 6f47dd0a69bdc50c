"""The parts of benchmarks/scale.py: simulated searchers against real services.

plan.py (the timetable) -> searchers.py (runs it) -> verdict.py (checks of the result)
    services.py      Redis, buffer, reward service, prompts: real processes
    trainer.py       draws, acks and publishes like a trainer, without a model
    host.py          a process with many searchers in one event loop; hosts.py: its end in this process
    watch.py         polls GET /v1/run during the run
"""
