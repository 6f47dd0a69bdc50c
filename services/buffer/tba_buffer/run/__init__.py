"""The state of the run: lineages, live settings, components, events, flow control and scaling."""
