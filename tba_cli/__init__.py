"""The command line `tba`: one small module per command, imported only when the command runs.

A function of this package that is asked for something that a person has to correct raises ConfigError. Its sentence
says what is wrong and what to do; main.py prints it. A service that says no or is away raises ServiceError, a store
StoreError. Docstrings name only what is raised besides.
"""
