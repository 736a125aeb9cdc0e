"""What every server shares: how it listens, answers, drains, logs and is configured. Knows no service."""
