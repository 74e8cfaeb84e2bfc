"""The categories of memory blocks."""

from __future__ import annotations

from typing import Annotated

from pytest_gpumem.facts.values.annotations import Name

CATEGORIES = {
    "parameter": "A module that ran, a fixture or the function passed to `measure` refers to the block as a "
    "parameter. Example: the weights of `blocks.*.mlp.0` in a GPT with four layers, 4 x float32[512, 128], 1.05 MB.",
    "buffer": "A module that ran, a fixture or the function passed to `measure` refers to the block as a buffer. "
    "Example: `running_mean` in `BatchNorm2d(64)`, float32[64], 256 B.",
    "gradient": "A parameter refers to the block as its gradient. In a rank that runs alone, the blocks in which "
    "`DistributedDataParallel` sends gradients are gradients too. Example: the gradients of `blocks.*.mlp.0`, 4 x "
    "float32[512, 128], 1.05 MB.",
    "optimizer state": "An optimizer keeps the block as the state of its parameters. The optimizer ran in the step, "
    "or a fixture's value contains it. Example: AdamW's two averages for `blocks.*.mlp.0`, 8 x float32[512, 128], "
    "2.10 MB.",
    "input": "The block was allocated before the recording, and the batch, the function passed to `measure` or a "
    "fixture's value refers to the block. Example: a batch of token ids, int64[8, 256], 16.38 kB.",
    "activation": "Python code in forward, or in a checkpoint that backward recomputes, allocated the block. The "
    "block was still allocated when the innermost module returned. For a block allocated outside modules, it was "
    "still allocated when backward began its next node. Example: outputs of `addmm` that the four layers save for "
    "backward, 4 x float32[2048, 512], 16.78 MB.",
    "temporary": "The block was allocated like an activation and freed before its module returned, but after its "
    "operator returned. Blocks that an autograd node allocates in backward are temporary too, and blocks that an "
    "optimizer allocates and frees in its step. Example: logits that `flatten` copies in the loss, float32[8, 255, "
    "256], 2.09 MB.",
    "workspace": "The block was freed before its operator, or the call of this operator, returned. Memory that the "
    "backend keeps from earlier steps is a workspace without module and line. Example: cuBLAS on an H100, 33.55 MB "
    "for each thread.",
    "other": "No other rule matches the block. These are blocks from before the recording that no known object refers "
    "to, blocks allocated outside modules in a step without backward, and blocks that an optimizer allocates in its "
    "step and does not free. Example: `torch.zeros(1024)` between two modules in a test without backward, 4.10 kB.",
    "unattributed": "A single row for all bytes of the step that are in no recorded block. Example: a step has 40 MB, "
    "and its recorded blocks have 38 MB, so 2 MB are unattributed.",
}
"""Each category for a memory block, with the rule for its blocks and an example.

A block gets the first category whose rule matches. The examples with a GPT come from `example_project/tiny_models/gpt.py`."""
Category = Annotated[str, Name("category", CATEGORIES)]
"""The name of a category."""
