"""Build models by name, from a configuration and with random weights, and a batch for their class."""
