"""The session in one pytest process: its plugins, its ranks and its store."""
