"""What operations are made of: processes, computations, timers, remote jobs. The contract is `primitives.py`."""
