"""The version, in one place that everybody may import."""

__version__ = "0.1.0"
