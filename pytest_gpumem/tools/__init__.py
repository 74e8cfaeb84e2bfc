"""The commands of ``gpumem``. Each command is beside the code that does its work."""
