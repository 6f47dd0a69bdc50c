"""The command line `tba`: one small module per command, imported only when the command runs.

A function of this package raises ConfigError for a problem that the user has to correct. Its message says what is wrong
and what to do; main.py prints it. A service that refuses or cannot be reached raises ServiceError, a store StoreError.
These three may come from any function here, so most docstrings do not name them.
"""
