"""The desired number of searchers, and how it is reached.

requests    how many an operator asked for, in Redis, with an audit
tba run     reads the desired number with the state of the run, and starts and stops searchers (tba_cli/local/)
kubernetes  reads and sets the replicas of one Deployment through the Kubernetes API
reconciler  compares these replicas with the desired number; gives the Deployment its own number back
scaling     all of it, and the task that reconciles every few seconds
"""

from tba_buffer.run.scaling.scaling import Scaling

__all__ = ["Scaling"]
