"""Devices that steps run on, with readings of their bytes and seconds. Nothing outside this folder asks "is it cuda?"."""
