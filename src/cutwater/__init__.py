"""Cutwater: one totally ordered, replicated log, and exactly-once event-time pipelines over it."""

__version__ = "0.1.0"
