"""Changed lines between two versions of the code, and verdicts that name these lines first."""
