"""What a step would need on a device that is not there."""
