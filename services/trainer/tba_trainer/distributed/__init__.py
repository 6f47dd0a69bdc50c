"""One trainer in several processes: torch FSDP2 shards the model, rank 0 leads, the others follow (docs/trainer.md).

    rank 0      the loop, as in one process; its learner tells the others before it does something itself
    rank 1..    no loop: they wait for the next command and do the same as rank 0 with their shards

process_group.py: the processes and their exchanges. leader.py, follower.py: the two sides of every command.
checkpoints.py, shares.py: both sides of checkpoints, and of weight versions. jobs.py: threads of followers beside
commands. launch.py: torchrun on each machine. tba_trainer/model/sharding.py: a model over the processes.
"""
