"""The library of the agent harness; the parts are imported from their own packages."""
