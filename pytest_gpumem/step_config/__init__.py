"""What the words of a step config mean."""
