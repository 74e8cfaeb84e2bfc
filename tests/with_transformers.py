"""transformers, as loaded before any GPU is used: by the forkserver (`preloaded.load_as_well`)."""

from __future__ import annotations

import os

from pytest_gpumem.torch_support.private_api.allocator import gpu_unseen

os.environ["HF_HUB_OFFLINE"] = "1"  # read when it is loaded
with gpu_unseen():  # torchao, which it loads, would use one
    import transformers.models.gpt2.modeling_gpt2
    import transformers.models.llama.modeling_llama  # noqa: F401
