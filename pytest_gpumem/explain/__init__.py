"""What a peak is made of: recorded events, the blocks that they tell of, their composition, and what changed in it."""
