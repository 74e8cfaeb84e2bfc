"""Set a project up for the first time: find the model tests, and propose files to gate them."""
