"""Sets of requirements, and virtual environments that hold them."""
