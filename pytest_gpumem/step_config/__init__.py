"""Step configs: the meaning of each word, and the repeated blocks of a model."""
