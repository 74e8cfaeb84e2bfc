"""Find a step config with which a model's step fits into memory. Settings that cost little, such as mixed precision, come
first.
"""
