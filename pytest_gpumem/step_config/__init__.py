"""Step configs: the meaning of each word, and the repeated blocks that it acts on."""
