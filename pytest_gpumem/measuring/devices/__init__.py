"""The devices for steps, with readings in bytes and seconds. Code outside this folder never asks "is it cuda?"."""
