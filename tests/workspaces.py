"""What cuBLAS's workspaces are in figures that are sums by hand, by release of torch."""

from __future__ import annotations

from importlib.metadata import version

WORKSPACE = 33_554_432
"""Of a thread that computes products, on sm_90."""
RELEASE = tuple(map(int, version("torch").split(".")[:2]))
KEPT = WORKSPACE if RELEASE < (2, 15) else 0
"""What such a thread keeps between products. From torch 2.15 on each product makes its own, and frees it."""
