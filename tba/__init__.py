"""tba: Trajectory Balance with Asynchrony, as services.

This package is the contract that the services share: wire formats, configuration, clients, the object store and the
command line. It never imports torch (tests/unit/repository/test_declared_dependencies.py).
"""

__version__ = "0.2.0"
