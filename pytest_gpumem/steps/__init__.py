"""Steps: how one is made under its config, a feature of it in each file."""
