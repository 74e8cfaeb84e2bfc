"""Accept figures from a report as baselines, for ``gpumem accept``. The session may have run on another machine."""
