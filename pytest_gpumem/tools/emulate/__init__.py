"""``gpumem emulate``: runs a program on an emulated GPU."""
