"""Find the step config that makes a model fit: cheap settings are tried before expensive ones."""
