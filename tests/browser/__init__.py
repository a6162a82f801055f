"""Pages in a real browser. A package, so that its shop ends with its last test."""
