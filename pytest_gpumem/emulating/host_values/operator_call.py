"""A call to an operator, with its arguments.

`native_reads` ignores the frames of this file, so C++ code that reads in `Call.run` is attributed to the operator.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pytest_gpumem.emulating.host_values.host_operators import tensors_among

if TYPE_CHECKING:
    import torch

    from pytest_gpumem.emulating.host_values.host_operators import Operator

_SCALED = frozenset({"_amp_foreach_non_finite_check_and_unscale_", "_amp_non_finite_check_and_unscale_"})
"""Operators that write a flag for infinite or NaN gradients to their second argument. `HostValues` ignores this write, because
unknown gradients are assumed to be finite."""


@dataclass(frozen=True, slots=True)
class Call:
    """A call to an operator that creates, changes or reads values. Operators that only return a view are not such calls."""

    func: Any
    operator: Operator
    args: tuple[Any, ...]
    named: dict[str, Any]
    tensors: list[torch.Tensor]
    """All tensors in ``args`` and ``named``, including tensors in lists."""

    def run(self) -> Any:
        return self.func(*self.args, **self.named)

    @property
    def on_gpu(self) -> list[torch.Tensor]:
        return [tensor for tensor in self.tensors if tensor.is_cuda]

    def arguments(self) -> dict[str, Any]:
        """Return the values of all arguments by parameter name, including default values."""
        parameters = self.func._schema.arguments  # noqa: SLF001 -- as in `operator_of`
        by_place = dict(zip((parameter.name for parameter in parameters), self.args, strict=False))
        return {parameter.name: parameter.default_value for parameter in parameters} | by_place | self.named

    def has_numbers_for_tensors(self) -> bool:
        """Return whether a number is passed for a tensor argument, for example 2 in ``x * 2``.

        If the kernel is called directly (`run_kernel`), it raises an exception for such a number.
        """
        arguments = self.func._schema.arguments  # noqa: SLF001 -- as in `operator_of`
        return any(
            isinstance(value, (int, float, complex)) and str(argument.type) == "Tensor"
            for argument, value in zip(arguments, self.args, strict=False)
        )

    def changed(self) -> list[torch.Tensor]:
        """Return the arguments to which the operator writes."""
        operator, args, named = self.operator, self.args, self.named
        if operator.writes_if is not None and not args[operator.writes_if]:
            return []
        written = [args[at] for at in operator.written if at < len(args)]
        changed = tensors_among((*written, *(named[name] for name in operator.written_names if name in named)))
        return [tensor for tensor in changed if tensor is not args[1]] if operator.name in _SCALED else changed
