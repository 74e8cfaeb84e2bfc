"""The ``gpumem`` fixture: steps and regions that a test measures itself."""

from __future__ import annotations

import inspect
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from pytest_gpumem.devices.contract import CannotRun
from pytest_gpumem.measure.looped import STEPS
from pytest_gpumem.measurement import Measurement, MeasuringError
from pytest_gpumem.relations.estimate import Estimate, findings_of
from pytest_gpumem.relations.gradients import assert_same_gradients
from pytest_gpumem.relations.growth import assert_no_growth
from pytest_gpumem.relations.state import state_of
from pytest_gpumem.runtest.loading import Loading, load
from pytest_gpumem.runtest.stepping import NOT_ITERABLE, MeasuredLoop
from pytest_gpumem.step_config.config import AXES, StepConfig, as_config
from pytest_gpumem.step_config.errors import ConfigError
from pytest_gpumem.steps.function import prepared_function
from pytest_gpumem.steps.inference import prepared_infer_step
from pytest_gpumem.steps.train_step import prepared_train_step
from pytest_gpumem.units import nearest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from types import TracebackType

    import torch

    from pytest_gpumem.runtest.run import TestRun
    from pytest_gpumem.steps.model_step import Loss, ModelOrFactory, OptimizerOrFactory


_T = TypeVar("_T")


class Region:
    """A region of a test that `Gpumem.track` measures; ``measurement`` is there once the region has ended."""

    def __init__(self) -> None:
        self.ended: Measurement | None = None

    @property
    def measurement(self) -> Measurement:
        if self.ended is None:
            raise MeasuringError("the region has not ended yet: read its measurement after the with block")
        return self.ended


class WithBlock(AbstractContextManager[_T]):
    """A context manager of ``gpumem.loop()`` and ``gpumem.track()``, for a ``with`` statement and nothing else."""

    def __init__(self, method: str, within: AbstractContextManager[_T]) -> None:
        self._method = method
        self._within = within

    def __enter__(self) -> _T:
        return self._within.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool | None:
        return self._within.__exit__(kind, error, traceback)

    def __getattr__(self, name: str) -> NoReturn:
        call = f"gpumem.{self._method}()"
        raise AttributeError(
            f"{name} is of what {call} gives to a with block: `with {call} as it:`, and then it.{name}"
        )

    def __iter__(self) -> NoReturn:
        raise TypeError(
            NOT_ITERABLE if self._method == "loop" else f"gpumem.{self._method}() is for a `with` statement"
        )


class Gpumem:
    """Measures steps of a model, or any code, on the device of this run (``--gpumem-device``).

    What is measured is judged when the test has ended: against the budget of its marker and of the settings, and, with
    ``--gpumem-baseline``, against its baselines. A test may measure more than once; ``name`` tells its measurements apart.
    """

    def __init__(self, run: TestRun | None, refuse: Callable[[str | None], NoReturn]) -> None:
        """Make the fixture of one test.

        Args:
            run: The test; ``None`` when the device cannot be used here. Then any use ends in ``refuse(None)``.
            refuse: Ends the test, which cannot be measured for the reason that it is given, as a clause.
        """
        self._maybe_run = run
        self._refuse = refuse

    @property
    def _run(self) -> TestRun:
        return self._refuse(None) if self._maybe_run is None else self._maybe_run

    def __getattr__(self, name: str) -> NoReturn:
        known = [method for method in vars(type(self)) if not method.startswith("_")]
        why = f"the fixture gpumem has no attribute {name!r}; {nearest(name, known)}"
        raise AttributeError(why, name=name, obj=self)

    @property
    def device(self) -> torch.device:
        """The torch device that is measured: put models and batches there::

        model = make_model().to(gpumem.device)
        with gpumem.track("forward"):
            model(torch.ones(256, 512, device=gpumem.device))
        """
        return self._run.device.torch_device

    def measure(
        self,
        fn: Callable[[], object],
        items: float | None = None,
        name: str | None = None,
        *,
        explain: bool | None = None,
    ) -> Measurement:
        """Measure ``fn()`` as a step that repeats: warmed up, then its memory, then its time.

        ``items`` is how many samples, tokens, ... one call works on; with it, throughput is measured. What ``fn`` holds
        (its closure, arguments bound to it, its object) belongs to the step; everything else that is live does not.
        """
        run = self._run
        with run.alone("measure", name), prepared_function(run.context, fn, items) as prepared:
            judged = run.judge(prepared, run.measure(prepared), name, explain=explain)
        del prepared  # what it held is gone when others see the measurement
        return run.keep(judged)

    def track(self, name: str | None = None) -> AbstractContextManager[Region]:
        """Measure the body of a ``with`` block, which runs once::

            with gpumem.track("generate") as region:
                model.generate(prompt)
            assert region.measurement.peak_allocated < 2e9

        What the test and its fixtures hold when the region begins belongs to it. Runs cold: no time is taken. Regions may be
        nested in regions, and in nothing else that is measured.
        """
        return WithBlock("track", self._tracked(name))

    @contextmanager
    def _tracked(self, name: str | None) -> Iterator[Region]:
        region = Region()
        with self._run.alone("track", name), self._run.region(name) as measurement:
            yield region
        region.ended = measurement()

    def load(self, factory: Callable[[], _T], *, name: str | None = None, explain: bool | None = None) -> Loading[_T]:
        """Measure ``factory()``, which loads a model onto the device, and give what it returns::

            loading = gpumem.load(lambda: Model.from_pretrained(path, device_map="cuda"))
            assert loading.measurement.peak_allocated < 1.1 * loading.measurement.loaded
            gpumem.infer_step(loading.value, batch)

        It runs once, cold, with the allocator emptied before, as in a program; no time is taken. What ``factory`` holds belongs
        to it; everything else that is live does not. ``explain``: whether it is run once more to tell what the peak is made of,
        while the model of the first time is there; by default as ``--gpumem-explain`` says, and where the test reads it.
        """
        run = self._run
        with run.alone("load", name):
            value, judged = load(run, factory, name, explain=explain)
        return Loading(value, run.keep(judged))

    def loop(
        self,
        steps: int = STEPS,
        *,
        items: float | None = None,
        name: str | None = None,
        explain: bool | None = None,
    ) -> AbstractContextManager[MeasuredLoop]:
        """Measure the steps of a training loop that runs within, as it is, and end it when they have been measured::

            with gpumem.loop() as training:
                trainer.train()
            assert training.measurement.growth == 0

        A step ends with ``optimizer.step()``, whoever calls it; with several optimizers, where the first of them steps again.
        Memory is read from the first ``steps`` steps but the first. A few more are counted, timed and explained; then
        the ``with`` block ends by an exception, through the loop's own ``finally`` and ``with`` blocks.

        ``items`` is how many samples, tokens, ... one step works on; with it, throughput is measured.

        Raises `MeasuringError` where the loop ends before there are four steps, or no optimizer steps. ``TypeError`` or
        ``ValueError`` if ``steps`` is not a whole number, 4 or more: the loop's batches are not an argument.
        """
        return WithBlock("loop", self._measured(MeasuredLoop(self._run, steps, name, items, explain=explain), name))

    @contextmanager
    def _measured(self, loop: MeasuredLoop, name: str | None) -> Iterator[MeasuredLoop]:
        with self._run.alone("loop", name), loop.within():
            yield loop

    def train_step(
        self,
        model_or_factory: ModelOrFactory,
        batch: Any,
        *,
        config: StepConfig | str | None = None,
        loss: Loss | None = None,
        optimizer: OptimizerOrFactory | None = None,
        items: float | str | None = None,
        name: str | None = None,
        explain: bool | None = None,
        **unknown: NoReturn,
    ) -> Measurement:
        """Measure forward + backward + optimizer of a model, in training mode.

        ``model_or_factory``: a module on the device, which is trained; or a class or function that builds one there.
        ``batch``: a tensor, a tuple of positional or a mapping of keyword arguments, moved to the device; or a function
        that makes one.
        ``config``: how the step is run, such as ``"amp-bf16,checkpoint=blocks,accumulate=4"`` or a `StepConfig`. Without one:
        plainly, in the precision that the model is in.
        ``loss(output, batch)`` returns a scalar; without it ``output.loss``, ``output["loss"]`` or a scalar output is taken.
        ``optimizer``: a class or function of the parameters, or an optimizer of a given model, in place of the config's.
        ``items``: what one step works on, for the throughput: a number, ``"samples"`` (the default) or ``"tokens"``.
        ``explain``: whether one more step is run to tell what the peak is made of (`Measurement.composition`); by default
        as ``--gpumem-explain`` says, and where the test reads it.

        Raises `ConfigError` for a config that cannot be read or has nothing to act on, ``ValueError`` or ``TypeError`` when
        model, batch, loss and optimizer do not make a step. What the device cannot run (TF32 on a CPU) skips the test.
        """
        _check_words("train_step", unknown)
        run, parsed = self._run, as_config(config)
        with (
            run.alone("train_step", name),
            self._or_refused(),
            prepared_train_step(
                run.context, model_or_factory, batch, config=parsed, loss=loss, optimizer=optimizer, items=items
            ) as prepared,
        ):
            judged = run.judge(prepared, run.measure(prepared), name, explain=explain)
        del prepared  # what it held is gone when others see the measurement
        return run.keep(judged)

    def infer_step(
        self,
        model_or_factory: ModelOrFactory,
        batch: Any,
        *,
        config: StepConfig | str | None = None,
        new_tokens: int | None = None,
        items: float | str | None = None,
        name: str | None = None,
        explain: bool | None = None,
        **unknown: NoReturn,
    ) -> Measurement:
        """Measure one forward pass under ``torch.inference_mode``, in evaluation mode. Arguments as for `train_step`.

        With ``new_tokens``: a call of the model's own ``generate``, as models of transformers have it, which adds that many
        tokens to the batch as a prompt. With ``cache=on`` in the config: a prompt (the batch without its last token) and the
        token after it, with a key/value cache; with ``weights=int8``: int8 weights.
        """
        _check_words("infer_step", unknown)
        run, parsed = self._run, as_config(config)
        with (
            run.alone("infer_step", name),
            self._or_refused(),
            prepared_infer_step(
                run.context, model_or_factory, batch, config=parsed, items=items, new_tokens=new_tokens
            ) as prepared,
        ):
            judged = run.judge(prepared, run.measure(prepared), name, explain=explain)
        del prepared  # what it held is gone when others see the measurement
        return run.keep(judged)

    def estimate(
        self,
        model_or_factory: ModelOrFactory,
        batch: Any,
        config: StepConfig | str | None = None,
        *,
        loss: Loss | None = None,
        optimizer: OptimizerOrFactory | None = None,
        name: str | None = None,
        **unknown: NoReturn,
    ) -> Estimate:
        """Measure a training step, and set what it holds beside what it must hold by formula.

        Bytes of parameters, gradients, optimizer state and master weights follow from the config; activations are the rest
        of what was measured. ``print()`` shows the table. A state that is more than 2 % off its formula is pointed out: in
        ``findings``, and at the end of the run. Arguments as for `train_step`.
        """
        _check_words("estimate", unknown)
        run, parsed = self._run, as_config(config)
        with (
            run.alone("estimate", name),
            self._or_refused(),
            prepared_train_step(
                run.context, model_or_factory, batch, config=parsed, loss=loss, optimizer=optimizer
            ) as prepared,
        ):
            step = run.measure(prepared)
            state = state_of(prepared, step.figures)
            findings = findings_of(state)
            judged = run.judge(prepared, replace(step, notes=(*step.notes, *findings)), name)
        del prepared
        return Estimate(run.keep(judged), state, findings)

    def assert_same_gradients(
        self,
        model_factory: Callable[[], torch.nn.Module],
        batch: Any,
        config_a: StepConfig | str,
        config_b: StepConfig | str,
        rtol: float | None = None,
        atol: float | None = None,
        *,
        loss: Loss | None = None,
    ) -> None:
        """Assert that a step gives every parameter the same gradient under both configs.

        Both begin with the weights and buffers that ``model_factory`` gave first, and the same random numbers (dropout). A
        parameter's gradients are the same when the root mean square of their difference is at most ``atol`` + ``rtol`` times
        that of the gradient under ``config_b``; by default as much as the less precise of the two configs explains.

        Raises ``AssertionError`` that names the first parameter that differs, with its error.
        """
        config_a, config_b = _both(config_a), _both(config_b)
        with self._run.alone("assert_same_gradients"), self._or_refused():
            assert_same_gradients(
                self._run.device, model_factory, batch, (config_a, config_b), rtol=rtol, atol=atol, loss=loss
            )
        self._run.relations += 1

    def assert_no_growth(self, step: Callable[[], object], steps: int = 20) -> None:
        """Assert that calling ``step()`` again and again keeps no more memory.

        Caches may fill in the first half of the ``steps``; from the second half on, nothing may stay.

        Raises ``AssertionError`` with the bytes that a step keeps, and the tensors that are kept. Give more ``steps`` where a
        cache fills more slowly.
        """
        with self._run.alone("assert_no_growth"):
            assert_no_growth(self._run.device, step, steps)
        self._run.relations += 1

    @contextmanager
    def _or_refused(self) -> Iterator[None]:
        """Skip the test if the device cannot run its step, or fail it under ``--gpumem-strict``."""
        try:
            yield
        except CannotRun as error:
            self._refuse(str(error))


def _check_words(method: str, unknown: Mapping[str, object]) -> None:
    """Raise ``TypeError`` for keyword arguments that a method does not have; those that a step config has are told as one."""
    for name, value in unknown.items():
        if name in AXES:
            word = value if name == "precision" else f"{name}={value}"
            why = f'it is a part of the step config: config="{word}"'
        else:
            why = nearest(name, [*inspect.signature(getattr(Gpumem, method)).parameters][1:-1])
        raise TypeError(f"gpumem.{method}() has no argument {name!r}; {why}")


def _both(config: StepConfig | str) -> StepConfig:
    made = as_config(config)
    if made is None:
        raise ConfigError("assert_same_gradients compares two step configs; write 'fp32' for a plain step")
    return made
