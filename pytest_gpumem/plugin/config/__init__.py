"""Options, settings and markers as frozen values. They decide which tests are measured, and with which budgets."""
