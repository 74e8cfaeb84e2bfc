"""Measurability of a machine and a project: facts that are collected, and findings that are made of them."""
