"""Jobs: a command that a test runs, and the GPU memory of each process of the command."""
