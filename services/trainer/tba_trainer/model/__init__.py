"""The policy: loading, adapters, packing, attention, output head, log-probs, sharding."""
