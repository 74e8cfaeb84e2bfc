"""The fixture ``gpumem``, with which a test measures its own steps and regions."""

from __future__ import annotations

import inspect
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from pytest_gpumem.base.errors import CannotRun, ConfigError, MeasuringError
from pytest_gpumem.base.units import nearest
from pytest_gpumem.measuring.measure.looped import STEPS
from pytest_gpumem.measuring.step_config.config import AXES, StepConfig, as_config
from pytest_gpumem.measuring.steps.function import prepared_function
from pytest_gpumem.measuring.steps.inference import prepared_infer_step
from pytest_gpumem.measuring.steps.model_source import model_source
from pytest_gpumem.measuring.steps.train_step import prepared_train_step
from pytest_gpumem.plugin.relations.estimate import Estimate, findings_of
from pytest_gpumem.plugin.relations.gradients import assert_same_gradients
from pytest_gpumem.plugin.relations.growth import assert_no_growth
from pytest_gpumem.plugin.relations.state import state_of
from pytest_gpumem.plugin.runtest.launching import Launched, launch
from pytest_gpumem.plugin.runtest.loading import Loading, load
from pytest_gpumem.plugin.runtest.single_run import measured_region
from pytest_gpumem.plugin.runtest.stepping import NOT_ITERABLE, MeasuredLoop
from pytest_gpumem.torch_support.static_access import class_name

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from types import TracebackType

    import torch

    from pytest_gpumem.facts.measurement import Measurement
    from pytest_gpumem.measuring.measure.prepared import PreparedStep
    from pytest_gpumem.measuring.steps.model_source import ModelOrFactory
    from pytest_gpumem.measuring.steps.model_step import Loss, OptimizerOrFactory
    from pytest_gpumem.plugin.runtest.run import TestRun


_T = TypeVar("_T")


class Region:
    """A region of a test, measured by `Gpumem.track`."""

    def __init__(self) -> None:
        self.measurement_at_end: Measurement | None = None

    @property
    def measurement(self) -> Measurement:
        """The measurement. Reading this attribute before the region has ended raises `MeasuringError`."""
        if self.measurement_at_end is None:
            raise MeasuringError("the region has not ended yet: read its measurement after the with block")
        return self.measurement_at_end


class WithBlock(AbstractContextManager[_T]):
    """The context manager from ``gpumem.loop()`` or ``gpumem.track()``.

    The object only works in a ``with`` statement. For example, ``gpumem.loop().callback()`` raises an ``AttributeError``
    that shows the ``with`` statement to write.
    """

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
        alias = "training" if self._method == "loop" else "region"
        raise AttributeError(
            f"{call} returns a context manager. Write `with {call} as {alias}:`, and then `{alias}.{name}`"
        )

    def __iter__(self) -> NoReturn:
        raise TypeError(
            NOT_ITERABLE
            if self._method == "loop"
            else "gpumem.track() returns a context manager. Write `with gpumem.track() as region:`"
        )


class Gpumem:
    """Measures steps of a model, or any code, on the device of this run (``--gpumem-device``).

    A test with the fixture ``gpumem`` chooses the steps and regions to measure, and may measure any number. The test's call
    as a whole is not measured. After the test, each measurement is compared with the budget from the marker and the
    settings. With ``--gpumem-baseline`` it is also compared with its baseline. For annotations:
    ``from pytest_gpumem import Gpumem``.

    Every measurement has a name, which is a part of its baseline's key. The default name is the method's name:
    ``train_step`` for a test's first call, ``train_step-2`` for its second. The default for `Gpumem.track` is ``region``.
    If a test takes several measurements, name them yourself, because the numbers shift when you add a measurement in front.
    Every method raises ``ValueError`` for a name that the test has used already, that is empty or longer than 200
    characters, or that cannot be stored in a file.

    `Gpumem.train_step`, `Gpumem.infer_step` and `Gpumem.measure` first collect garbage and empty the allocator's caches.
    Then they repeat the step until two steps in a row have the same peaks (2 to 6 steps), and run it four more times. After
    that they run one more step to count its operators (for `flops` and similar metrics), and time the step in several
    rounds. If the step config has ``compile``, or if a gradient scaler is used, they first repeat the step, at most 16
    times, until a step compiles nothing and keeps the scale.

    Other processes that a step uses, for example a server, have measurements as well, such as ``measure: serve.py`` and
    ``measure: all processes``. They have a peak and a `growth`, and no times. There is one exception: if only other processes
    use memory, the methods return the measurement of all processes, and this measurement has the times of the step.

    A region may contain other regions. Any other measurement within a measurement raises `MeasuringError`.
    """

    def __init__(self, run: TestRun | None, refuse: Callable[[str | None], NoReturn]) -> None:
        """Make the fixture for one test.

        Args:
            run: The run of the test; ``None`` if this machine lacks the device. Then every method calls ``refuse(None)``.
            refuse: Skips or fails a test. The argument is a clause with the reason why the test cannot be measured, or
                ``None`` if the machine lacks the device.
        """
        self._maybe_run = run
        self._refuse = refuse

    @property
    def _run(self) -> TestRun:
        return self._refuse(None) if self._maybe_run is None else self._maybe_run

    def __getattr__(self, name: str) -> NoReturn:
        attributes = [attribute for attribute in vars(type(self)) if not attribute.startswith("_")]
        why = f"the fixture gpumem has no attribute {name!r}; {nearest(name, attributes)}"
        raise AttributeError(why, name=name, obj=self)

    @property
    def device(self) -> torch.device:
        """The ``torch.device`` on which memory is measured. Put models and batches on this device.

        Example::

            def test_forward(gpumem):
                model = GPT().to(gpumem.device)
                with gpumem.track("forward"):
                    model(torch.ones(16, 64, device=gpumem.device))
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
        """Call ``fn()`` repeatedly, and measure first its memory, then its time.

        The figures include tensors that ``fn`` refers to by its closure, its defaults, its bound arguments or its
        ``__self__``. Tensors in globals, and all other live memory, are subtracted. The random number generators are
        restored afterwards, so the test's next random number does not depend on the number of runs. If ``fn`` counts its
        own calls, the count includes every run.

        If ``fn`` sends a request to a server that the test started, the server's `growth` shows the bytes that it keeps for
        each request. See [growth from request to
        request](../guide/servers-and-launched-jobs.md#growth-from-request-to-request).

        Args:
            fn: The function to run.
            items: The number of samples, tokens or other items in one call. The measurement has a `throughput` only with
                ``items``.
            name: The name of the measurement; by default ``measure``.
            explain: ``True`` records the composition of the peak (`Measurement.composition`), ``False`` does not. By
                default ``--gpumem-explain`` decides. A composition is also recorded if the test's function reads
                ``measurement.composition``. ``--gpumem-explain=never`` switches all recording off.

        Returns:
            The measurement.

        Raises:
            MeasuringError: The figures would not be valid, for example because ``fn`` uses no memory on the device.
            ValueError: The name is in use, empty or too long.

        Example::

            def test_product(gpumem):
                a, b = torch.ones(256, 512, device=gpumem.device), torch.ones(512, 64, device=gpumem.device)
                measurement = gpumem.measure(lambda: a @ b, items=256)
                assert measurement.flops == 2 * 256 * 512 * 64
        """
        _check_function("measure", fn)
        return self._measured_step("measure", prepared_function(self._run.context, fn, items), name, explain)

    def track(self, name: str | None = None) -> AbstractContextManager[Region]:
        """Measure the body of a ``with`` block. The body runs once, without warm-up, and is not timed.

        The figures include tensors that the test and its fixtures hold when the region begins. `retained` is memory from
        the body that is still allocated at the end, for example in local variables. A region may contain other regions. The
        composition of a region's peak is never recorded, because this needs a second run and the body runs once. To record
        it, pass the same code to `Gpumem.measure` as a function.

        Args:
            name: The name of the measurement; by default ``region``.

        Returns:
            A context manager that yields a region. Read its ``measurement`` after the block.

        Raises:
            MeasuringError: Another measurement is running, or the test reads ``measurement`` within the block.

        Example::

            def test_two_forwards(gpumem):
                model = GPT().to(gpumem.device)
                with gpumem.track("forward") as region:
                    model(batch.to(gpumem.device))
                assert region.measurement.peak_allocated < 200e3
        """
        return WithBlock("track", self._tracked(name))

    @contextmanager
    def _tracked(self, name: str | None) -> Iterator[Region]:
        region = Region()
        with self._run.alone("track", name), measured_region(self._run, name) as measurement:
            yield region
        region.measurement_at_end = measurement()

    def load(self, factory: Callable[[], _T], *, name: str | None = None, explain: bool | None = None) -> Loading[_T]:
        """Measure ``factory()``, which loads a model onto the device.

        The factory runs once, with an empty allocator, as at the start of a program. It is not timed. Before the run,
        garbage is collected and the allocator's cache is emptied, so every run has the same figures. `peak_allocated`
        counts the loaded object and all temporary memory, such as a second copy of the weights. `loaded` is the memory of
        the object, and `retained` is other memory that the factory leaves allocated. On CUDA, `peak_reserved` is the
        allocator's reserved memory on the GPU, including buffers that the factory allocates but never fills.

        The peak includes tensors that ``factory`` refers to by its closure or its bound arguments. Other live memory is
        subtracted. The random number generators are not restored afterwards.

        To record the composition of the peak, the factory runs once more while the first object is alive. If the GPU has no
        room for two objects, the measurement gets a note and no composition. The factory may load from several threads, as
        transformers does with a ``device_map`` since 5.0. On a GPU all figures include the memory from these threads, and
        the composition shows this memory without lines and operators.

        If the factory starts a server, or uses other processes in another way, they have measurements such as ``load:
        serve.py``. If only other processes use memory, the measurement is the one of all processes. To explain these
        processes, the factory also runs once more, even if it has run again for the composition. Processes that start then,
        report their memory, and still run afterwards are ended by SIGTERM.

        Args:
            factory: A function without arguments that loads and returns a model, a state dict, or any other object with
                tensors.
            name: The name of the measurement; by default ``load``.
            explain: As for `Gpumem.measure`.

        Returns:
            The loaded object as ``value``, and its ``measurement``.

        Raises:
            TypeError: ``factory`` is not callable.
            Exception: Any error from ``factory``.

        Example::

            def test_loading(gpumem):
                loading = gpumem.load(lambda: GPT().to(gpumem.device))
                assert loading.measurement.peak_allocated <= 1.1 * loading.measurement.loaded
                gpumem.infer_step(loading.value, batch)
        """
        run = self._run
        with run.alone("load", name):
            value, keep = load(run, factory, name, explain=explain)
        return Loading(value, keep())

    def launch(
        self,
        command: Sequence[str | os.PathLike[str]],
        *,
        ranks: int | None = None,
        timeout: float | None = None,
        env: Mapping[str, str] | None = None,
        cwd: str | os.PathLike[str] | None = None,
        name: str | None = None,
        explain: bool | None = None,
    ) -> Launched:
        """Run a command, wait for its end, and measure the memory of each process that it starts.

        The command may start further processes, for example by ``torchrun``, ``accelerate launch``, `subprocess` or
        `multiprocessing`. Each process with torch that inherits the environment writes its own figures: `peak_allocated` is
        ``torch.cuda.max_memory_allocated()`` and `peak_reserved` is ``torch.cuda.max_memory_reserved()`` from its start to
        its end, even if it resets these peaks. Memory outside torch's allocator, such as a CUDA context, does not count. On
        the CPU, `peak_allocated` is the most bytes in tensors, and needs Linux and a C compiler.

        The job has a measurement, called ``launch`` by default, and so has each process, such as ``launch: train.py rank 1``.
        A process is called after its program, with its rank (``RANK``, the variable from mpirun or srun, or ``LOCAL_RANK``)
        or a number if several processes run the same program. The job's figure on a GPU is the largest sum of the peaks of
        processes that ran at the same time. This sum is an upper bound, because the peaks may be at different times. A budget
        limits the most bytes that the processes held at the same time, if they are known. If at least two ranks used a GPU,
        the job also has `imbalance`. Budgets and baselines apply to all these measurements. They have no times.

        The test fails if its figures would be too low: if a process loads torch or CUDA without writing figures, is killed by
        SIGKILL or another signal that ends it at once, or still runs when the command has ended. A process writes no figures if
        it does not inherit the environment, runs with ``python -I``, ``-E`` or ``-S``, or uses a GPU without torch. Only Linux
        shows such processes.

        Args:
            command: The program and its arguments.
            ranks: The number of ranks that have to use a GPU, as in ``torchrun --nproc-per-node``. By default any number may.
            timeout: The longest time in seconds. Then the command and its processes are ended, and the test fails.
            env: Environment variables in addition to the test's own.
            cwd: The folder in which the command runs; by default the current folder.
            name: The name of the job's measurement; by default ``launch``.
            explain: As for `Gpumem.measure`. To record the composition of each process's peak, the command runs once more.

        Returns:
            The job's ``measurement``, the measurements of its ``processes`` by name, its ``exit_status``, ``stdout`` and
            ``stderr``.

        Raises:
            JobError: The command cannot be started, ends with another exit status than 0, takes too long, lacks ranks, has a
                process without figures, or uses no GPU.
            TypeError: ``command`` is not a list of words, ``timeout`` is not a number above 0, ``ranks`` is not a whole
                number of 1 or more, or ``env`` has other values than texts and paths.
            ValueError: A text in ``command``, ``env`` or ``cwd`` is invalid, for example with a NUL character.

        Example::

            def test_training_job(gpumem):
                job = gpumem.launch(["torchrun", "--nproc-per-node=2", "train.py"], ranks=2, timeout=600)
                assert job.measurement.imbalance <= 1.05
        """
        with self._run.alone("launch", name), self._or_refused():
            job, judged, processes = launch(
                self._run, command, ranks=ranks, timeout=timeout, env=env, cwd=cwd, name=name, explain=explain
            )
        # A failure shows the processes first, because they have the lines.
        measurements = {process: self._run.keep(result) for process, result in processes.items()}
        measurement = self._run.keep(judged)
        return Launched(measurement, measurements, job.status, job.output, job.errors)

    def loop(
        self,
        steps: int = STEPS,
        *,
        items: float | None = None,
        name: str | None = None,
        explain: bool | None = None,
    ) -> AbstractContextManager[MeasuredLoop]:
        """Measure the steps of an unchanged training loop, and end the loop when they have been measured.

        A step ends when ``optimizer.step()`` of a torch optimizer has run, no matter which code calls this method. All
        micro-batches since the previous ``optimizer.step()`` belong to the same step. With several optimizers, a step ends
        when any optimizer steps for the second time. If optimizers step within ``backward()``, the step ends just before
        the next module is called. A loop without a torch optimizer has to call ``training.step_ended()`` at the end of each
        step.

        The memory figures come from the loop's first ``steps`` steps. The first step creates lasting state, such as AdamW's
        moments, so only budgets apply to its peak. `growth` comes from the last 12 of these steps. If some of the 12 steps kept
        bytes, but too few to distinguish a leak from a cache, 12 more steps are measured. Further steps are counted, explained
        and timed. If the steps have different peaks, 6 to ``steps`` steps are recorded until a step reaches the highest peak
        again. If no step reaches it, the composition shows the step with the closest peak, and a note says so. Other processes
        with memory on the device have measurements as well, such as ``loop: serve.py``. Their figures come from the same steps.

        When all of this is measured, an exception leaves the ``with`` block, and the loop's own ``finally`` blocks and
        context managers run as usual. The exception is not a subclass of ``Exception``, so ``except Exception`` in the loop
        does not catch it. The test continues after the ``with`` block. ``training.callback()`` returns a callback for the
        ``Trainer`` of transformers or Lightning, which stops training without an exception. If the loop ends by itself
        before everything is measured, the measurement includes the steps up to this end, and a note says so. The random
        number generators are not restored afterwards.

        The step whose operators are counted needs more memory than an ordinary step. If memory runs out in this step, the
        loop ends as if the measurement were complete, and the error becomes a note. Any other error in the loop fails the
        test.

        Args:
            steps: The number of steps for the memory figures, 4 or more. Do not pass the loop's batches to this method.
            items: The number of samples, tokens or other items in one step. The measurement has a `throughput` only with
                ``items``.
            name: The name of the measurement; by default ``loop``.
            explain: As for `Gpumem.measure`.

        Returns:
            A context manager that yields the measured loop. Read its ``measurement`` after the block.

        Raises:
            MeasuringError: The loop ended before its fourth step, or no step was seen.
            TypeError: ``steps`` is not a whole number.
            ValueError: ``steps`` is less than 4.

        Example::

            def test_loop(gpumem):
                model, data = GPT().to(gpumem.device), batch.to(gpumem.device)
                optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
                with gpumem.loop() as training:
                    for _ in range(1000):
                        optimizer.zero_grad()
                        model(data).backward()
                        optimizer.step()
                assert training.measurement.growth == 0
        """
        return WithBlock("loop", self._measured(MeasuredLoop(self._run, steps, name, items, explain=explain), name))

    @contextmanager
    def _measured(self, loop: MeasuredLoop, name: str | None) -> Iterator[MeasuredLoop]:
        with self._run.alone("loop", name), loop.within():
            yield loop

    def train_step(  # noqa: D417 - ``unknown`` catches wrong arguments
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
        """Measure a training step of a model in training mode: forward, backward and the optimizer's step.

        While the step runs, ``config.use_cache`` of the model and its modules is ``False``, as trainers set it. If you pass
        a model instance, its gradients are cleared first, and every step changes its weights.

        Args:
            model_or_factory: A module on `gpumem.device`, or a class or function without arguments that builds a module. A
                factory is called with the device as torch's default device. If this fails, the factory is called again
                without a default device. The module is moved to the device. Lazy modules are initialized by a forward pass.
            batch: A tensor, a tuple or list of positional arguments, a mapping of keyword arguments, or a function without
                arguments that returns one of these. Its tensors are moved to the device.
            config: The step config, such as ``"amp-bf16,checkpoint=blocks,accumulate=4"``, or a `StepConfig`. By default
                the step runs in the model's own precision. Autocast is off, even if the test calls this method within an
                autocast block.
            loss: A function ``loss(output, batch)`` that returns a scalar. By default the loss is ``output.loss``,
                ``output["loss"]`` or a scalar output.
            optimizer: A class or function that takes the trainable parameters and returns an optimizer, or an optimizer
                that was made with the model instance's parameters. The default is the optimizer that the config names, or
                ``torch.optim.AdamW`` if the config names no optimizer.
            items: The number of items in one step, for `throughput`. Pass a finite number above 0, ``"samples"`` (the size
                of the first dimension of the batch's first tensor, the default) or ``"tokens"`` (the number of elements in
                the batch's first integer tensor).
            name: The name of the measurement; by default ``train_step``.
            explain: As for `Gpumem.measure`.

        Returns:
            The measurement.

        Raises:
            ConfigError: The config cannot be parsed, has a setting without effect on this model (such as
                ``checkpoint=blocks`` for a model without blocks), or names an optimizer although the argument ``optimizer``
                is given.
            TypeError: The model, the batch, the loss or the optimizer has a wrong type.
            ValueError: The arguments do not fit together, for example because the model is on another device.

        Example::

            def test_checkpointing_recomputes(gpumem):
                plain = gpumem.train_step(GPT, batch, config="fp32", name="plain")
                blocks = gpumem.train_step(GPT, batch, config="fp32,checkpoint=blocks", name="blocks")
                assert plain.peak_allocated < 310e3  # 303.41 kB on the CPU
                assert blocks.recomputed > plain.recomputed == 0
        """
        _check_words("train_step", unknown)
        context, parsed, source = self._run.context, as_config(config), model_source(model_or_factory)
        step = prepared_train_step(context, source, batch, config=parsed, loss=loss, optimizer=optimizer, items=items)
        return self._measured_step("train_step", step, name, explain)

    def infer_step(  # noqa: D417 - ``unknown`` catches wrong arguments
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
        """Measure a forward pass of a model in evaluation mode, under ``torch.inference_mode()``.

        With ``new_tokens`` the step calls the model's method ``generate()`` from transformers instead. The batch is the
        prompt, and the call appends new tokens. The model's ``generation_config`` chooses the decoding method (such as beam
        search) and the token that ends a text. If the model ends the text before it has ``new_tokens`` tokens, the step
        ends as well. The number of new tokens is a part of the workload, and only new tokens count for ``tokens/s``.

        Args:
            model_or_factory: As for `Gpumem.train_step`.
            batch: As for `Gpumem.train_step`.
            config: As for `Gpumem.train_step`. In addition, ``cache=on`` keeps the keys and values of attention,
                ``cache=off`` does not, and ``weights=int8`` quantizes the weights.
            new_tokens: The number of tokens to generate.
            items: As for `Gpumem.train_step`.
            name: The name of the measurement; by default ``infer_step``.
            explain: As for `Gpumem.measure`.

        Returns:
            The measurement.

        Raises:
            ConfigError: The config cannot be parsed, or has settings without effect on an infer step, such as
                ``checkpoint``.
            TypeError: The model or the batch has a wrong type.
            ValueError: The arguments do not fit together, for example because the model is on another device.

        Example::

            def test_inference(gpumem):
                assert gpumem.infer_step(GPT, batch).peak_allocated < 90e3  # 82.94 kB on the CPU
        """
        _check_words("infer_step", unknown)
        context, parsed, source = self._run.context, as_config(config), model_source(model_or_factory)
        step = prepared_infer_step(context, source, batch, config=parsed, items=items, new_tokens=new_tokens)
        return self._measured_step("infer_step", step, name, explain)

    def estimate(  # noqa: D417 - ``unknown`` catches wrong arguments
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
        """Measure a training step, and compare the memory of its state with formulas.

        The state consists of parameters, gradients, optimizer state and master weights. Formulas compute the bytes of each
        from the model and the config. Activations are only measured. If measured bytes differ from their formula by more
        than 2 %, this difference is a finding. Other memory that stays allocated between steps is a finding as well.
        Findings become notes of the measurement, and the end of the run prints them. Findings do not fail the test, unless
        you write ``assert not estimate.findings``.

        Args:
            model_or_factory: As for `Gpumem.train_step`.
            batch: As for `Gpumem.train_step`.
            config: As for `Gpumem.train_step`.
            loss: As for `Gpumem.train_step`.
            optimizer: As for `Gpumem.train_step`.
            name: The name of the measurement; by default ``estimate``.

        Returns:
            The estimate. ``print(estimate)`` shows its table.

        Raises:
            ConfigError: As for `Gpumem.train_step`.
            TypeError: As for `Gpumem.train_step`.
            ValueError: As for `Gpumem.train_step`.

        Example::

            def test_state(gpumem):
                estimate = gpumem.estimate(GPT, batch, "fp32")
                assert estimate.parameters == 16_640 * 4
                assert estimate.optimizer_state == 2 * 16_640 * 4 + 8 * 4
                assert not estimate.findings
        """
        _check_words("estimate", unknown)
        run, parsed, source = self._run, as_config(config), model_source(model_or_factory)
        with (
            run.alone("estimate", name),
            self._or_refused(),
            prepared_train_step(run.context, source, batch, config=parsed, loss=loss, optimizer=optimizer) as prepared,
            run.processes.window() as window,
        ):
            step = run.measure(prepared)
            state = state_of(prepared, step.figures)
            findings = findings_of(state)
            judged = run.judge(prepared, replace(step, notes=(*step.notes, *findings)), name)
        del prepared
        return Estimate(run.keep_step(judged, window), state, findings)

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
        """Assert that one step gives every parameter the same gradient under two configs.

        The model is built twice, and the second model starts with the weights, buffers and random numbers of the first.
        Gradients are compared before they are clipped and unscaled. The settings ``optimizer``, ``clip`` and ``zero_grad``
        of the configs are ignored. A parameter's two gradients are the same if the root mean square of their difference is
        at most ``atol`` + ``rtol`` x the root mean square of the gradient under ``config_b``.

        By default, ``rtol`` depends on the less precise of the two configs: 1e-4 for ``fp32``, 1e-2 for ``tf32``, 5e-2 for
        ``amp-fp16`` and ``fp16``, 1e-1 for ``amp-bf16`` and ``bf16``. If a config names no precision, the dtype of the
        parameters decides. The tolerance applies to a gradient as a whole, because rounding may change single entries
        completely. For example, it may move a value to the other side of a ReLU's corner at 0. A wrong gradient is still
        found, because its error is about as large as the gradient.

        ``accumulate`` and ``compile`` draw other random numbers than a plain step, so switch dropout off. With
        ``accumulate``, batch statistics differ as well, and so does a loss that is a mean over unequal numbers of tokens.
        Between two precisions, values that cross a ReLU's corner change gradients by 4 to 33 % (measured with a randomly
        initialized ResNet-18 in float16). In this case pass ``rtol``, or compare two configs with the same precision.

        Args:
            model_factory: A class or function without arguments that builds the model.
            batch: As for `Gpumem.train_step`.
            config_a: The first config.
            config_b: The second config. Its gradients are the reference.
            rtol: The relative tolerance, a ratio.
            atol: The absolute tolerance. The default is ``rtol`` / 100 x the root mean square of the largest gradient, so
                gradients that are 0 except for rounding errors pass.
            loss: As for `Gpumem.train_step`.

        Raises:
            AssertionError: A gradient differs, or all gradients are 0. The message names the first parameter and its error.
            ConfigError: A config cannot be parsed, or has no effect on the model.
            TypeError: ``model_factory`` is a model.

        Example::

            def test_checkpointing_keeps_gradients(gpumem):
                gpumem.assert_same_gradients(GPT, batch, "fp32", "fp32,checkpoint=blocks")
        """
        config_a, config_b = _needed_config(config_a), _needed_config(config_b)
        with self._run.alone("assert_same_gradients"), self._or_refused():
            source = model_source(model_factory)
            assert_same_gradients(
                self._run.device, source, batch, (config_a, config_b), rtol=rtol, atol=atol, loss=loss
            )
        self._run.relations += 1

    def assert_no_growth(self, step: Callable[[], object], steps: int = 20) -> None:
        """Assert that memory does not grow while ``step()`` is called again and again.

        In the first half of the calls memory may grow, for example because caches fill. In the second half it may not grow.
        If memory still grows, ``step()`` is called once more, and tensors that this call replaces do not count as a leak.
        Under torchrun with several ranks, this additional call is left out. Memory that the allocator has reserved but does
        not use is ignored. Memory may not grow in other processes either, for example in a server that ``step()`` asks.

        Args:
            step: The function to call.
            steps: The number of calls, 2 or more. Choose a larger number if a cache fills slowly.

        Raises:
            AssertionError: Memory grows. The message shows the bytes per step, the kinds of tensors and their holders. For
                another process, it shows the lines that made the tensors.
            MeasuringError: ``step()`` used no memory on the device.
            TypeError: ``steps`` is not a whole number.
            ValueError: ``steps`` is less than 2.

        Example::

            def test_training_keeps_nothing(gpumem):
                model, data = GPT().to(gpumem.device), batch.to(gpumem.device)

                def step():
                    model(data).backward()
                    model.zero_grad(set_to_none=True)

                gpumem.assert_no_growth(step)
        """
        _check_function("assert_no_growth", step)
        run = self._run
        with run.alone("assert_no_growth"):
            with run.processes.window():
                uses_memory = assert_no_growth(run.device, step, steps, run.growth_elsewhere())
            if not uses_memory:
                raise MeasuringError(run.held_nothing("the step"))
        run.relations += 1

    def _measured_step(
        self, method: str, step: AbstractContextManager[PreparedStep], name: str | None, explain: bool | None
    ) -> Measurement:
        """Measure and judge the step that ``method`` prepared."""
        run = self._run
        with run.alone(method, name), self._or_refused(), step as prepared, run.processes.window() as window:
            judged = run.judge(prepared, run.measure(prepared), name, explain=explain)
        del prepared  # Free the step's tensors before the measurement is returned.
        return run.keep_step(judged, window)

    @contextmanager
    def _or_refused(self) -> Iterator[None]:
        """Skip the test if the device cannot run the step; fail the test under ``--gpumem-strict``."""
        try:
            yield
        except CannotRun as error:
            self._refuse(str(error))


def _check_words(method: str, unknown: Mapping[str, object]) -> None:
    """Raise ``TypeError`` for unknown keyword arguments.

    If the name is an axis of the step config, the message shows the config. For example, ``checkpoint="blocks"`` raises
    ``gpumem.train_step() has no argument 'checkpoint'; it is a part of the step config: config="checkpoint=blocks"``.
    """
    for name, value in unknown.items():
        if name in AXES:
            word = value if name == "precision" else f"{name}={value}"
            why = f'it is a part of the step config: config="{word}"'
        else:
            why = nearest(name, [*inspect.signature(getattr(Gpumem, method)).parameters][1:-1])
        raise TypeError(f"gpumem.{method}() has no argument {name!r}; {why}")


def _check_function(method: str, fn: object) -> None:
    """Raise ``TypeError`` if ``fn`` is not callable, for example because the caller passed the result of the function."""
    if not callable(fn):
        call = f"gpumem.{method}"
        raise TypeError(f"{call}() needs a function, but got {class_name(type(fn))}: write {call}(lambda: ...)")


def _needed_config(config: StepConfig | str) -> StepConfig:
    parsed = as_config(config)
    if parsed is None:
        raise ConfigError("assert_same_gradients compares two step configs; write 'fp32' for a plain step")
    return parsed
