"""Statistics of step times: a sample against a baseline's runs, and two revisions in turns."""
