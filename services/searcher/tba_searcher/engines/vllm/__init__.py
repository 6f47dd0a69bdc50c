"""The vLLM engine: vLLM inside the searcher process, with weight updates in place."""
