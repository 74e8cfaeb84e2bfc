"""The ``gpumem`` command."""
