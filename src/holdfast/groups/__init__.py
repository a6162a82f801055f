"""Groups, chains and callbacks: calls that belong together. See docs/guides/groups.md."""
