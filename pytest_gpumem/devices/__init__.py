"""Where a step runs, and how its bytes and seconds are read. Nothing outside this folder asks "is it cuda?"."""
