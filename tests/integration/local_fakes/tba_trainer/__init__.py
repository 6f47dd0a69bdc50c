"""A stand-in for the trainer, for tests of local mode: same command line, same endpoints, no work."""
