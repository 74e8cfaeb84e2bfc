"""Steps, prepared under a step config. Each feature has its own file."""
