"""Reports: functions of verdicts, and of nothing else."""
