"""Models by name: built from a configuration alone, with random weights, and a batch that fits their class."""
