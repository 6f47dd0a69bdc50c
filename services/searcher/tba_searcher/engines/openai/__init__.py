"""An engine behind an OpenAI-compatible endpoint with vLLM's interface for weight updates."""
