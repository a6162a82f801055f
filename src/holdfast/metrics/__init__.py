"""Metrics: what the processes of a runner count, and their text for Prometheus."""
