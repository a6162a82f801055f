"""Durable workflows: a body that is replayed from its log; see docs/decisions/0011-workflows.md."""
