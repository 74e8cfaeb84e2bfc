"""Set a project up for the first time: find the tests that run models, and propose the files that gate them."""
