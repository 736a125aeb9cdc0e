"""The coordinator as a service."""
