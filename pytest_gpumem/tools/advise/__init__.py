"""Find a step config with which a model's step fits into memory. Settings with a low cost in speed or accuracy come
first.
"""
