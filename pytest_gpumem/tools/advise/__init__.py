"""Find a step config with which a model fits into memory. Cheap settings are tried first."""
