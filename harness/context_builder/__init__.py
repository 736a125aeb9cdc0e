"""context builder."""
