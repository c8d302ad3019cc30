"""Seconds and memory of one AdamW step with states on the host, for a model's parameters without the model.

    python benchmarks/host_optimizer.py --model llama-8b --steps 4

Gradients appear one after the other on the GPU, as backward makes them from the last layer to the first. The predicted
time is what the host's memory needs: 12 bytes of states read and written per parameter, and 18 for the gradient and
the result on their way, at --host-gbps.
"""

from __future__ import annotations

import argparse
import json
import resource
import time

import torch
from torch import nn
from transformers import AutoModelForCausalLM

from longspan.integrations.presets import preset_config
from longspan.optim import HostAdamW, host_bytes

_STATE_BYTES, _WAY_BYTES = 24, 18


def parameters(model: str, layers: int | None) -> list[nn.Parameter]:
    """Make bfloat16 parameters of a preset's shapes on the GPU."""
    config = preset_config(model, **({} if layers is None else {"num_hidden_layers": layers}))
    with torch.device("meta"):
        shapes = [p.shape for p in AutoModelForCausalLM.from_config(config).parameters()]
    return [nn.Parameter(torch.randn(shape, device="cuda", dtype=torch.bfloat16).mul_(0.02)) for shape in shapes]


def step(optimizer: HostAdamW, trained: list[nn.Parameter]) -> dict[str, float]:
    """Take one step and say what it took."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    start_bytes, start_s = torch.cuda.memory_allocated(), time.perf_counter()
    for parameter in reversed(trained):
        parameter.grad = torch.full_like(parameter, 1e-3)
        optimizer.submit(parameter, optimizer.param_groups[0])
        parameter.grad = None
    submitted_s = time.perf_counter() - start_s
    optimizer.finish()
    torch.cuda.synchronize()
    return {
        "step_s": round(time.perf_counter() - start_s, 3),
        "submitted_s": round(submitted_s, 3),
        "gpu_extra_gib": round((torch.cuda.max_memory_allocated() - start_bytes) / 2**30, 3),
        "host_peak_gib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="llama-8b")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--host-gbps", type=float, default=100.0)
    parser.add_argument("--commit", default="")
    parser.add_argument("--out")
    options = parser.parse_args()
    trained = parameters(options.model, options.layers)
    count = sum(p.numel() for p in trained)
    predicted_s = count * (_STATE_BYTES + _WAY_BYTES) / (options.host_gbps * 1e9)
    print(f"{count:,} parameters, states {host_bytes(trained) / 2**30:.1f} GiB, predicted {predicted_s:.2f} s")
    optimizer = HostAdamW(trained, lr=1e-5)
    rows = []
    for number in range(options.steps):
        rows.append({"step": number, **step(optimizer, trained)})
        print(rows[-1], flush=True)
    first = trained[0]
    if not torch.equal(optimizer.state[first]["master"].bfloat16(), first.detach().cpu()):
        raise SystemExit("a parameter is not its master, rounded")
    if options.out:
        about = {"gpu": torch.cuda.get_device_name(), "threads": torch.get_num_threads(), "torch": torch.__version__}
        about |= {"commit": options.commit, "date": time.strftime("%Y-%m-%d"), "predicted_s": round(predicted_s, 3)}
        with open(options.out, "w") as file:
            json.dump(about | {"options": vars(options), "rows": rows}, file, indent=1)


if __name__ == "__main__":
    main()
