"""Find a step config with which a model fits: cheap settings are tried first."""
