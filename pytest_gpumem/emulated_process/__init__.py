"""A process on an emulated GPU: its start, and what it used when it ends."""
