r"""Where metrics go beside the ledger: metrics.jsonl always, and the trackers that the recipe names.

    loop ------- step ------> Tracking --> [thread] metrics.jsonl
    [thread] evaluations ---->        \--> [thread] TensorBoard, Weights & Biases, trackio: one thread each

Nothing here can stop or slow training: every tracker has a queue of bounded length and a thread; what does not fit is
dropped and counted, and what fails is logged once and counted.
"""

from tba_trainer.tracking.hub import Tracking, open_tracking

__all__ = ["Tracking", "open_tracking"]
