"""Find the GPUs that a program fits into: run the program on emulated GPUs, and see whether PyTorch runs out of memory."""
