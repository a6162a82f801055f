"""Streams: chunks that a call writes while it runs, for readers in any process."""
