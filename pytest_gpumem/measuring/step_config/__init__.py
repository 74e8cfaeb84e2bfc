"""Step configs: what each word means, and a model's repeated blocks."""
