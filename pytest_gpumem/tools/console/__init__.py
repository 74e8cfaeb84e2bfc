"""Code that several commands share: output, options, the project around the current folder, shell completion."""
