"""Commands that read session reports."""
