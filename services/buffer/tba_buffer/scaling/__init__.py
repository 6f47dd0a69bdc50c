"""How many searchers there should be, and who sees to it.

wish        how many an operator asked for, in Redis, with its audit (wishes.py)
tba run     reads the number with every look at the run, and starts and stops searchers (tba/local/fleet.py)
deployment  the Kubernetes API: reads and sets the replicas of one Deployment (deployment.py)
keeper      compares those replicas with what is wanted; gives the Deployment its own number back (keeper.py)
scaling     all of it, and the task that looks every `scaling.reconcile_s` (scaling.py)
"""

from tba_buffer.scaling.scaling import Scaling

__all__ = ["Scaling"]
