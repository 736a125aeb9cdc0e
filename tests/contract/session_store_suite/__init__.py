"""The session store's contract as tests for any implementation: import a module's tests and give a fixture `store`."""
