"""What every client and server of gRPC shares: channels, calls, and errors as statuses. Knows no service."""
