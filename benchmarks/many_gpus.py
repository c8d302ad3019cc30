"""Runs for four and eight GPUs, each within ten minutes, predictions beside measurements.

    python benchmarks/many_gpus.py correct 8     # layers of the 8B shape in bfloat16, by heads, rings and both
    python benchmarks/many_gpus.py steps 8       # seconds per step at 131,072 and 524,288 tokens, as the plan decides
    python benchmarks/many_gpus.py heads 8       # the same with heads alone; ring, both: with a ring, and with both
    python benchmarks/many_gpus.py others 8      # others' at 131,072 tokens; others_long: at 524,288
    python benchmarks/many_gpus.py attention 8   # attention alone, dense and packed, 64:8 heads of 128
    python benchmarks/many_gpus.py million 8     # Qwen3-8B at 1,048,576 tokens
    python benchmarks/many_gpus.py longest 8     # the longest row of the 8B shape that fits the GPUs and this host

With `--small` a tiny model goes the same way on processes of the CPU.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence

LIMIT_S = 560
"""Of a run, all its commands together."""

LENGTHS = {False: (131_072, 524_288), True: (512, 1024)}
"""Tokens of the rows that are timed, in full and in small."""

Command = list[str]


def degrees(gpus: int) -> Iterator[tuple[int, int]]:
    """Yield (ulysses, ring) of all GPUs: heads alone, a ring alone, and what lies between."""
    return ((u, gpus // u) for u in range(gpus, 0, -1) if gpus % u == 0)


def divided(ulysses: int, ring: int) -> Command:
    """Return the flags of degrees."""
    return ["--sp", str(ulysses * ring), "--ulysses", str(ulysses), "--ring", str(ring)]


def correct(gpus: int, small: bool) -> Iterator[Command]:
    """Compare with one process, for all degrees of all GPUs, and on three and six with heads that do not divide."""
    model = ["--model", "tiny-mistral"] if small else ["--model", "llama-8b", "--dtype", "bfloat16"]
    pairs = [*degrees(gpus), *((n, 1) for n in (3, 6) if n < gpus)]
    yield from (["check", *model, *divided(*pair)] for pair in pairs)


def steps(gpus: int, small: bool) -> Iterator[Command]:
    """Time steps as the plan decides."""
    yield [*work(small), "--sp", str(gpus)]


def heads(gpus: int, small: bool) -> Iterator[Command]:
    """Time the same steps where heads alone are exchanged."""
    yield [*work(small), *divided(gpus, 1)]


def ring(gpus: int, small: bool) -> Iterator[Command]:
    """Time the same steps on a ring alone."""
    yield [*work(small), *divided(1, gpus)]


def both(gpus: int, small: bool) -> Iterator[Command]:
    """Time the same steps with both: as many heads exchanged as leave a ring of two or more, where any do."""
    yield [*work(small), *divided(*max(degrees(gpus), key=lambda pair: (1 not in pair, pair[0])))]


def others(gpus: int, small: bool) -> Iterator[Command]:
    """Time others on the shorter rows, after longspan on the same machine."""
    yield [*work(small, LENGTHS[small][:1]), "--sp", str(gpus), *([] if small else ["--peers", "--liger"])]


def others_long(gpus: int, small: bool) -> Iterator[Command]:
    """Time others on the longer rows."""
    yield [*work(small, LENGTHS[small][1:]), "--sp", str(gpus), *([] if small else ["--peers", "--liger"])]


def work(small: bool, lengths: Sequence[int] | None = None) -> Command:
    """Return the command that times steps of lengths, all of them by default."""
    tokens = ",".join(str(length) for length in lengths or LENGTHS[small])
    return ["bench", "step", "--model", "tiny-mistral" if small else "llama-8b", "--seq-len", tokens, "--steps", "1"]


def attention(gpus: int, small: bool) -> Iterator[Command]:
    """Time attention over all GPUs against the kernel alone."""
    shape, tokens = ("8:8:16", "2K") if small else ("64:8:128", "128K")
    yield [
        "bench",
        "attention",
        "--sp",
        str(gpus),
        "--heads",
        shape,
        "--seq-len",
        tokens,
        "--times",
        "2" if small else "20",
    ]


def million(gpus: int, small: bool) -> Iterator[Command]:
    """Time a step of a million tokens."""
    model, tokens = ("tiny-qwen3", "1K") if small else ("qwen3-8b", "1M")
    yield ["bench", "step", "--model", model, "--sp", str(gpus), "--seq-len", tokens, "--steps", "1"]


def longest(gpus: int, small: bool) -> Iterator[Command]:
    """Prove that long rows fit: of a million tokens per GPU first, then longer ones while there is time."""
    model, tokens = ("tiny-mistral", "512") if small else ("llama-8b", f"{gpus}M")
    yield ["bench", "fit", "--model", model, "--sp", str(gpus), "--seq-len", tokens, *([] if small else ["--search"])]


RUNS = {
    run.__name__: run for run in (correct, steps, heads, ring, both, others, others_long, attention, million, longest)
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what is asked for; return how many of its commands failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", choices=RUNS)
    parser.add_argument("gpus", type=int)
    parser.add_argument("--small", action="store_true")
    given = parser.parse_args(arguments)
    commands = list(RUNS[given.run](given.gpus, given.small))
    failed = 0
    for words in commands:
        limits = ["--limit-s", str(LIMIT_S // len(commands))] if words[0] == "bench" else []
        apart = ["--device", "cpu", *(["--out", tempfile.gettempdir()] if limits else [])] if given.small else []
        line = [*words, *limits, *apart]
        print("longspan", *line, flush=True)
        failed += subprocess.run([sys.executable, "-m", "longspan", *line], check=False).returncode != 0
    return failed


if __name__ == "__main__":
    sys.exit(main())
