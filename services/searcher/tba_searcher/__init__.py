"""The searcher service: generates completions with slightly old weights and pushes them to the buffer."""
