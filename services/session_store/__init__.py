"""The session store as a service."""
