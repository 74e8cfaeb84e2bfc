"""Two revisions on one machine: runs in turn, the judgement of their ratio, and its reports."""
