"""Why a value cannot be stored, and where in it the culprit is."""

from __future__ import annotations


class Refused(Exception):
    """Why a value cannot be stored. Each container on the way out adds its step, so success pays nothing for paths."""

    def __init__(self, why: str, *, too_deep: bool = False) -> None:
        self.why, self.too_deep = why, too_deep
        self.steps: list[tuple[object, str]] = []

    def locate(self, root: str) -> tuple[str, str]:
        """The path and the reason. The same container twice on one path is a cycle."""
        path, seen = root, dict[int, str]()
        for container, segment in reversed(self.steps):
            if self.too_deep and id(container) in seen:
                return path, f"refers back to {seen[id(container)]}; a value that contains itself cannot be stored"
            seen[id(container)] = path
            path += segment
        return (f"{path[:60]}…" if self.too_deep else path), self.why
