"""Start processes on an emulated GPU, and record how much of its memory they use."""
