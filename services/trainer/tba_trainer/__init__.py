"""The trainer service: draws batches from the buffer, updates the policy, publishes weight versions."""
