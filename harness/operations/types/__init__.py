"""The operation types: one pure step machine per module."""
