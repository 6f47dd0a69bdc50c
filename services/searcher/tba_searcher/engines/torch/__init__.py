"""The embedded engine: batched generation with transformers, on any machine."""
