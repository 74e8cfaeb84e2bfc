"""Assertions about steps that hold on every machine and need no baseline, such as equal gradients under two step configs."""
