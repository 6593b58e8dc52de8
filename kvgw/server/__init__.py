"""The data plane's door: listeners, connections, and one exchange after the other on each."""
