"""The policy model: loading, LoRA adapters, whole and sharded parameters, packed sequences, log-probs."""
