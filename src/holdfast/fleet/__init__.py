"""Runners: heartbeat, failure detection, recovery, services, worker processes."""
