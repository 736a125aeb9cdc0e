"""What every session store over SQL does: its calls, and the statements that both engines run."""
