"""Words of a step config, parsed, and the repeated blocks of a model that they act on."""
