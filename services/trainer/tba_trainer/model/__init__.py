"""The policy: loading and adapters, its parameters whole and sharded, packed sequences, log-probs."""
