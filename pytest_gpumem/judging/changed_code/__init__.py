"""Changed lines between two versions of the code, and verdicts that list these lines first."""
