"""An engine behind an OpenAI-compatible endpoint of vLLM."""
