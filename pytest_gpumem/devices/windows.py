"""Peaks of stretches that may lie within one another, though a device keeps only one peak at a time."""

from __future__ import annotations

from pytest_gpumem.devices.contract import Device, Peak, highest


class Window:
    """A stretch of time and the highest peak seen in it so far."""

    __slots__ = ("peak",)

    def __init__(self) -> None:
        self.peak: Peak | None = None

    def see(self, peak: Peak) -> None:
        self.peak = peak if self.peak is None else highest(self.peak, peak)


class Windows:
    """The open windows of a device. Whoever takes the device's peak takes it for all of them."""

    __slots__ = ("_device", "_open")

    def __init__(self, device: Device) -> None:
        self._device = device
        self._open: list[Window] = []

    def open(self) -> Window:
        self.border()
        if not self._open:
            self._device.forget_libraries()
        window = Window()
        self._open.append(window)
        return window

    def border(self) -> None:
        """End of a phase: what was the peak until now is told to every open window."""
        peak = self._device.pop_peak()
        for window in self._open:
            window.see(peak)

    def close(self, window: Window) -> Peak:
        self.border()
        self._open.remove(window)
        assert window.peak is not None, "border() has just been seen by every open window"
        return window.peak
