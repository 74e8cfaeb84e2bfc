"""The first set-up of a project: which tests run models, and the files by which they are gated."""
