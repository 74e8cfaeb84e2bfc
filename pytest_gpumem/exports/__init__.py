"""A session's figures for other tools: one file a format, each a function of figures."""
