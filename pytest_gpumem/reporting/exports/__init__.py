"""Write the figures in session reports for other tools, for example Bencher or TensorBoard."""
