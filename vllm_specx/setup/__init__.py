"""Setting up a machine. Runs before anything is installed, so: the standard library only."""
