"""The desired number of searchers, and how it is reached.

tba run     reads the desired number with the state of the run, and starts and stops searchers (tba_cli/local/)
kubernetes  reads and sets the replicas of one Deployment through the Kubernetes API
scaling     all of it, and the task that sets these replicas to the desired number every few seconds
"""

from tba_buffer.run.scaling.scaling import Scaling

__all__ = ["Scaling"]
