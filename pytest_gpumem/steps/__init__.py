"""Steps: what they run, and the runner that measures them."""
