"""Explain a peak: record a step's allocations, find each block's lifetime, and list the tensors live at the peak."""
