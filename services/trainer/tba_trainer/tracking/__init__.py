r"""Trackers: where metrics go beside the ledger. metrics.jsonl always, and those that the recipe names.

    loop ------- step ------> TrackerGroup --> [thread] metrics.jsonl
    [thread] evaluations ---->            \--> [thread] TensorBoard, Weights & Biases: one thread each

Nothing here can stop or slow training: every tracker has a queue of bounded length and a thread. A record that does
not fit is dropped and counted; a failure is logged once and counted.
"""

from tba_trainer.tracking.tracker_group import TrackerGroup, open_trackers

__all__ = ["TrackerGroup", "open_trackers"]
