"""Start processes on an emulated GPU, and record their memory usage."""
