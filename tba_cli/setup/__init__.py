"""`tba setup`: set up everything that a run needs before it begins, once per deployment."""
