"""Commands that read the store or remove stored baselines."""
