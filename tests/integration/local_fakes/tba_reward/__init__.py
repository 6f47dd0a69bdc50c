"""A stand-in for the reward, for tests of local mode: same command line, same endpoints, no work."""
