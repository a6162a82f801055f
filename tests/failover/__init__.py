"""Failures of a replica set of three nodes. A package, so that its servers end with its last test."""
