"""The operation manager as a service."""
