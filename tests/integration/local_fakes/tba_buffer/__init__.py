"""A stand-in for the buffer, for tests of local mode: same command line, same endpoints, no work."""
