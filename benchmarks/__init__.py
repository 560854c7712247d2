"""Measurements of Draftwood. README.md lists every script with its question and its newest result."""
