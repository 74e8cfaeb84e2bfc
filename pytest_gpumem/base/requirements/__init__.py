"""Sets of requirements, and virtual environments with these packages."""
