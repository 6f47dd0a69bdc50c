"""A stand-in for the searcher, for tests of local mode: same command line, same endpoints, no work."""
