"""Ask the real cuDNN for the workspaces of a convolution, without torch and without stand-ins: python ask_cudnn.py LIBRARY ...

The arguments after the library are the data type's number, whether channels come last, and batch, channels, height and filters
of a 3x3 convolution with padding 1. Prints the workspace of the first plan forward, for the input and for the weight.
"""

from __future__ import annotations

import ctypes
import json
import sys

from pytest_gpumem.emulating.emulation.gpus import emulated_gpu

ENUMERATION, INT64, FLOAT, DESCRIPTOR, CHARACTER = 1, 3, 4, 15, 24
ENGINE_CONFIG, HEURISTICS, PLAN, GRAPH, TENSOR, GPU = 3, 4, 5, 15, 17, 38
CONVOLUTION = 1
FORWARD, WEIGHT, INPUT = 10, 11, 12
TYPES = {ENUMERATION: ctypes.c_int, INT64: ctypes.c_int64, FLOAT: ctypes.c_float, DESCRIPTOR: ctypes.c_void_p}
ALPHA = {FORWARD: 700, INPUT: 706, WEIGHT: 712}
"""The first of an operation's attributes: alpha, beta, the convolution, then weight, input and output."""

library = ctypes.CDLL(sys.argv[1])


def checked(status: int) -> None:
    if status:
        raise SystemExit(f"cuDNN says {status}")


class Descriptor:
    def __init__(self, kind: int) -> None:
        self.at = ctypes.c_void_p()
        checked(library.cudnnBackendCreateDescriptor(kind, ctypes.byref(self.at)))

    def set(self, name: int, kind: int, *values: object) -> Descriptor:
        plain = [value.at.value if isinstance(value, Descriptor) else value for value in values]
        array = (TYPES[kind] * len(plain))(*plain)
        checked(library.cudnnBackendSetAttribute(self.at, name, kind, ctypes.c_int64(len(plain)), array))
        return self

    def finalized(self) -> Descriptor:
        checked(library.cudnnBackendFinalize(self.at))
        return self


def gpu() -> Descriptor:
    h100 = emulated_gpu("emulated:h100")
    told = {
        "deviceName": h100.name,
        "deviceVer": 900,
        "cudaDeviceId": 0,
        "pciDeviceId": 0x2330,
        "isTccDriver": 0,
        "driverVer": 13000,
        "multiProcessorCount": h100.multiprocessors,
        "warpSize": 32,
        "maxThreadsPerBlock": 1024,
        "maxThreadsPerSM": h100.threads_per_multiprocessor,
        "maxCtasPerSM": h100.blocks_per_multiprocessor,
        "maxGridSize": [2147483647, 65535, 65535],
        "maxBlockSize": [1024, 1024, 64],
        "regsPerBlock": 65536,
        "maxRegistersPerSM": 65536,
        "maxSharedMemoryPerBlock": h100.shared_per_block,
        "maxSharedMemoryPerBlockOptin": h100.shared_per_block_optin,
        "reservedSharedMemoryPerBlock": 1024,
        "supportCoopLaunch": 1,
        "totalGlobalMem": h100.total_bytes,
        "l2CacheSize": h100.l2_bytes,
        "smClockRateKHz": h100.sm_khz,
        "memClockRateKHz": h100.memory_khz,
    }
    text = json.dumps(told).encode() + b"\0"
    made = Descriptor(GPU)
    checked(library.cudnnBackendSetAttribute(made.at, 2702, CHARACTER, ctypes.c_int64(len(text)), text))
    return made.finalized()


def tensor(number: int, dtype: int, channels_last: bool, *shape: int) -> Descriptor:
    _, channels, height, width = shape
    area = height * width
    strides = (channels * area, 1, channels * width, channels) if channels_last else (channels * area, area, width, 1)
    made = Descriptor(TENSOR).set(900, INT64, 16).set(901, ENUMERATION, dtype).set(906, INT64, number)
    return made.set(902, INT64, *shape).set(903, INT64, *strides).finalized()


def workspace(
    operation: int, dtype: int, channels_last: bool, batch: int, channels: int, size: int, filters: int
) -> int:
    how = Descriptor(CONVOLUTION).set(100, ENUMERATION, 0).set(106, INT64, 2)  # it adds up in float32
    checked(library.cudnnBackendSetAttribute(how.at, 101, 7, ctypes.c_int64(1), ctypes.byref(ctypes.c_int(1))))
    for name, value in ((102, 1), (103, 1), (104, 1), (105, 1)):
        how.set(name, INT64, value, value)
    weight, given, made = (
        tensor(number, dtype, channels_last, *shape)
        for number, shape in enumerate(
            [(filters, channels, 3, 3), (batch, channels, size, size), (batch, filters, size, size)], 1
        )
    )
    first = ALPHA[operation]
    run = Descriptor(operation).set(first, FLOAT, 1.0).set(first + 1, FLOAT, 0.0)
    run.set(first + 2, DESCRIPTOR, how.finalized())
    for name, of in enumerate((weight, given, made), first + 3):
        run.set(name, DESCRIPTOR, of)
    graph = Descriptor(GRAPH).set(801, DESCRIPTOR, run.finalized()).finalized()
    device = gpu()
    heuristics = Descriptor(HEURISTICS).set(201, DESCRIPTOR, graph).set(204, DESCRIPTOR, device)
    checked(library.cudnnBackendSetAttribute(heuristics.at, 200, 8, ctypes.c_int64(1), ctypes.byref(ctypes.c_int(0))))
    config, count = Descriptor(ENGINE_CONFIG), ctypes.c_int64()
    array = (ctypes.c_void_p * 1)(config.at.value)
    arguments = (202, DESCRIPTOR, ctypes.c_int64(1), ctypes.byref(count), array)
    checked(library.cudnnBackendGetAttribute(heuristics.finalized().at, *arguments))
    plan = Descriptor(PLAN).set(401, DESCRIPTOR, config).set(407, DESCRIPTOR, device).finalized()
    found = ctypes.c_int64()
    arguments = (402, INT64, ctypes.c_int64(1), ctypes.byref(count), ctypes.byref(found))
    checked(library.cudnnBackendGetAttribute(plan.at, *arguments))
    return found.value


if __name__ == "__main__":
    dtype, channels_last, *shape = map(int, sys.argv[2:])
    found = [workspace(operation, dtype, bool(channels_last), *shape) for operation in (FORWARD, INPUT, WEIGHT)]
    sys.stdout.write(" ".join(map(str, found)) + "\n")
