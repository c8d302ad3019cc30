"""Where time goes: kinds of kernels, what ran alone, and gaps."""

from __future__ import annotations

from longspan.bench.timeline import describe


def test_time_is_told_by_kind_and_overlap() -> None:
    second = 1_000_000_000
    events = [
        (0, 2 * second, "flash_fwd"),
        (1 * second, 3 * second, "ncclDevKernel"),
        (4 * second, 5 * second, "triton_poi"),
    ]
    lines = describe(events).splitlines()
    assert lines[0] == "wall 5.000 s, busy 4.000 s, idle 1.000 s"
    told = {line.split(" s ")[1].split("  ")[0].strip(): line for line in lines[1:4]}
    assert "alone    1.000 s" in told["attention"]
    assert "alone    1.000 s" in told["nccl"]
    assert "alone    1.000 s" in told["compiled elementwise"]
    assert any("1000.000 ms after ncclDevKernel before triton_poi" in line for line in lines)
    assert describe([]) == "no kernels"
