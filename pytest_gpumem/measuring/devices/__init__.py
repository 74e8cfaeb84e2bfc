"""The devices on which steps are measured in bytes and seconds. Code outside this folder never asks "is it cuda?"."""
