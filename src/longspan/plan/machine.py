"""What planning needs to know about hardware: memory, and the rates that were measured or published."""

from __future__ import annotations

from dataclasses import dataclass

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
        names: parts of the name that its driver gives.
        source: where the figures come from.
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
    names: tuple[str, ...] = ()
    source: str = ""

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
