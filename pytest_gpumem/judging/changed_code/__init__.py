"""Find the lines that changed between two versions of the code, and list these lines first in verdicts."""
