"""Options, settings and markers, as frozen values: which tests are measured, and under which budgets."""
