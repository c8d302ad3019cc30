"""What planning needs to know about hardware: memory, and the rates that were measured or published."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from longspan.errors import ConfigError

GIB = 1 << 30


@dataclass(frozen=True)
class KernelRate:
    """An attention kernel on one device.

    Args:
        name: as `longspan doctor` lists it.
        forward_tflops, backward_tflops: on long causal sequences, heads of 128.
        expands: whether backward makes dk and dv for every query head before adding them up.
    """

    name: str
    forward_tflops: float
    backward_tflops: float
    expands: bool = False


@dataclass(frozen=True)
class Machine:
    """One device and its links.

    Args:
        memory_bytes: what the driver reports as total.
        peak_tflops: the data sheet's dense bf16 rate, for MFU.
        gemm_tflops: what large bf16 matrix products reach.
        kernels: attention rates, those of the kernel that `auto` takes first.
        memory_gbs: what elementwise kernels reach.
        host_gbs: pinned copies, each way.
        link_gbs: what a rank gets out of collectives inside a node.
        network_gbs: of a rank's share of the network between nodes.
    """

    name: str
    memory_bytes: int
    peak_tflops: float
    gemm_tflops: float
    kernels: tuple[KernelRate, ...]
    memory_gbs: float
    host_gbs: float
    link_gbs: float
    network_gbs: float

    @property
    def on_gpu(self) -> bool:
        """Whether it is not the host itself."""
        return self.name != "cpu"

    def rate(self, kernel: str) -> KernelRate:
        """Return a kernel's rates; `auto` is the first of the machine's, an unknown one counts as the slowest.

        A composed kernel ("cudnn+aten-flash") counts as its first part.
        """
        if kernel == "auto":
            return self.kernels[0]
        known = (rate for rate in self.kernels if rate.name == kernel.split("+")[0])
        return next(known, min(self.kernels, key=lambda rate: rate.backward_tflops))


def _machine(name: str, memory_gib: float, kernels: tuple[KernelRate, ...], **rates: float) -> Machine:
    return Machine(name, round(memory_gib * GIB), kernels=kernels, **rates)


_HOPPER = (
    KernelRate("fa4", 648, 610),
    KernelRate("cudnn", 567, 534),
    KernelRate("fa3", 620, 540),
    KernelRate("aten-flash", 326, 326, expands=True),
    KernelRate("fa2", 326, 326, expands=True),
)

MACHINES: Mapping[str, Machine] = MappingProxyType(
    {
        machine.name: machine
        for machine in (
            _machine(
                "h200", 139.0, _HOPPER, peak_tflops=989, gemm_tflops=756, memory_gbs=4000, host_gbs=55, link_gbs=300,
                network_gbs=45,
            ),
            _machine(
                "h100-80g", 79.1, _HOPPER, peak_tflops=989, gemm_tflops=700, memory_gbs=2800, host_gbs=50,
                link_gbs=300, network_gbs=45,
            ),
            _machine(
                "a100-80g",
                79.1,
                (KernelRate("fa2", 200, 170, expands=True), KernelRate("aten-flash", 190, 160, expands=True)),
                peak_tflops=312, gemm_tflops=260, memory_gbs=1700, host_gbs=24, link_gbs=200, network_gbs=22,
            ),
            _machine(
                "b200",
                178.0,
                (KernelRate("fa4", 1400, 1000), KernelRate("cudnn", 1300, 950)),
                peak_tflops=2250, gemm_tflops=1600, memory_gbs=6500, host_gbs=55, link_gbs=600, network_gbs=45,
            ),
            _machine(
                "cpu", 64.0, (KernelRate("cpu", 0.03, 0.03),),
                peak_tflops=0.2, gemm_tflops=0.1, memory_gbs=10, host_gbs=10, link_gbs=2, network_gbs=1,
            ),
        )
    }
)  # fmt: skip
"""Machines by name.

Measured here, on two H200 with torch 2.11: the h200's products, fa4, cudnn and aten-flash, host copies and links.
h100-80g has the same cores at less power and an older memory: its attention rates are the h200's. fa3, a100-80g and
b200 are derived from published figures (the FlashAttention papers and the makers' data sheets) and were not measured.
cpu is a rough figure for two cores."""


@dataclass(frozen=True)
class Cluster:
    """Equal devices on equal nodes.

    Args:
        gpus: devices in all.
        node_gpus: devices per node.
        gpu_bytes: memory of a device.
        host_bytes: memory of a node, which its ranks share.
    """

    machine: Machine
    gpus: int
    node_gpus: int
    gpu_bytes: int
    host_bytes: int

    @property
    def local_ranks(self) -> int:
        """Ranks that share a node's memory."""
        return min(self.gpus, self.node_gpus)

    @property
    def link_gbs(self) -> float:
        """What a rank gets out of a collective over all devices."""
        machine = self.machine
        if self.gpus <= self.node_gpus:
            return machine.link_gbs
        return min(machine.link_gbs, machine.network_gbs * self.node_gpus)


def parse_gpus(text: str) -> tuple[int, Machine]:
    """Read "2xH200" -> 2 and the machine; "H200" is one.

    Raises:
        ConfigError: it cannot be read, or the machine is not known.
    """
    match = re.fullmatch(r"(?:(\d+)\s*x\s*)?([a-z][a-z0-9-]*)", text.strip().lower())
    if match is None or match[1] == "0":
        raise ConfigError(f"GPUs are given as a number and a kind, such as 2xH200, got {text!r}.")
    return int(match[1] or 1), find_machine(match[2])


def find_machine(name: str) -> Machine:
    """Return a machine by name, in any case; a memory size may be left out (h100 is h100-80g).

    Raises:
        ConfigError: there is none.
    """
    known = name.lower()
    found = MACHINES.get(known) or next((m for key, m in MACHINES.items() if key.split("-")[0] == known), None)
    if found is None:
        raise ConfigError(f"There are no figures for a machine {name!r}; known are {', '.join(MACHINES)}.")
    return found


_BINARY = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_DECIMAL = {"K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}


def parse_bytes(text: str) -> int:
    """Read an amount of memory: "256GiB" (binary), "1.9TB" (decimal), "80G" (binary).

    Raises:
        ConfigError: it cannot be read.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT])(i?B)?", text.strip(), re.IGNORECASE)
    if match is None or not float(match[1]):
        raise ConfigError(f"An amount of memory is given as 256GiB or 1.9TB, got {text!r}.")
    unit = match[2].upper()
    units = _DECIMAL if (match[3] or "").upper() == "B" else _BINARY
    return round(float(match[1]) * units[unit])
