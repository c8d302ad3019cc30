"""From settings to rows: choose, prove, build, measure, and write each row down as soon as it is there."""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import torch

from longspan.bench.clock import Deadline
from longspan.bench.gate import Small, everywhere, gate, small
from longspan.bench.memory import format_memory, parse_memory
from longspan.bench.predict import Host, planned, predicted
from longspan.bench.results import OUT_OF_MEMORY, STOPPED, Results, Target
from longspan.bench.settings import AUTO, Asked, Setting
from longspan.bench.workload import Workload, build
from longspan.errors import ConfigError, TrainingError
from longspan.keep import Memory
from longspan.once import tell


@dataclass(frozen=True)
class Case:
    """A setting whose memory is decided."""

    setting: Setting
    memory: Memory
    check: Small
    row: dict[str, Any]


Measure = Callable[[Workload, Case, dict[str, Any], Results, Deadline], None]
"""Fill a row, saving as it goes; return with `state` done, or another where it had to stop."""


def measure(
    config: Any, asked: Asked, target: Target, deadline: Deadline, device: torch.device, measure_one: Measure
) -> dict[str, Any] | None:
    """Measure all settings that can be; every rank calls it.

    Args:
        config: a transformers configuration with positions for the longest row.

    Returns:
        On the first rank the content of the result file, with its `path`.

    Raises:
        TrainingError: out of memory, which ends all ranks; rows before it are in the file.
    """
    results = Results.open(target, "fit" if asked.fit else "step", asked, device)
    cases = [case for setting in asked.settings if (case := _decide(config, asked, setting, results, device))]
    proven = _prove(config, cases, results, deadline, device)
    try:
        if proven:
            _measure_all(config, asked, proven, results, deadline, device, measure_one)
    except Exception as error:
        fits = not isinstance(error, torch.OutOfMemoryError)
        if target.pointer is None:  # else the process that started this one hears of the first error of all ranks
            results.end_running(f"failed: {error}" if fits else OUT_OF_MEMORY)
        if fits:
            raise
        raise TrainingError(f"{OUT_OF_MEMORY}: {str(error).splitlines()[0]}") from None
    return None if results.path is None else {**results.content, "path": str(results.path)}


def host_of(asked: Asked, device: torch.device) -> Host:
    """Describe what the processes run on."""
    memory_bytes = asked.work.host_memory_bytes
    if device.type != "cuda":
        return Host(None, asked.work.sp, memory_bytes // asked.work.sp, memory_bytes)
    about = torch.cuda.get_device_properties(device)
    return Host(about.name, asked.work.sp, about.total_memory, memory_bytes)


def _decide(config: Any, asked: Asked, setting: Setting, results: Results, device: torch.device) -> Case | None:
    """Decide on a memory setting; one that the plan refuses gets a row that says so."""
    row: dict[str, Any] = {"system": "longspan", "memory": setting.memory, "tokens": setting.tokens}
    host = host_of(asked, device)
    try:
        if setting.memory == AUTO:
            text = everywhere(format_memory(planned(config, asked.work, host, setting.tokens)))
            memory, row["memory"], row["chosen"] = parse_memory(text), AUTO, text
        else:
            memory = parse_memory(setting.memory)
            memory.check_layers(config.get_text_config().num_hidden_layers)
    except ConfigError as error:
        results.begin(row)
        results.end_running(f"refused: {error}")
        tell(f"REFUSED {setting.memory} {setting.tokens}: {error}")
        return None
    row |= predicted(config, asked.work, host, setting.tokens, memory)
    return Case(setting, memory, small(config, asked.work, memory, setting.tokens, device), row)


def _prove(config: Any, cases: list[Case], results: Results, deadline: Deadline, device: torch.device) -> list[Case]:
    """Check every configuration once; cases of those that are wrong get a row without numbers."""
    proven = []
    for case in cases:
        name = case.check.name
        known = everywhere(results.gates.get(name))
        if known is None and not deadline.allows(0.0, device):
            known = {"ok": False, "why": [STOPPED]}
        elif known is None:
            known = gate(config, case.check, device)
            tell(f"GATE {name}: {'ok' if known['ok'] else '; '.join(known['why'])}")
            results.gates[name] = known
            results.save()
        if known["ok"]:
            proven.append(case)
            continue
        results.begin({"system": "longspan", "memory": case.setting.memory, "tokens": case.setting.tokens})
        results.end_running(STOPPED if known["why"] == [STOPPED] else "gate failed: " + "; ".join(known["why"]))
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return proven


def _measure_all(
    config: Any,
    asked: Asked,
    cases: list[Case],
    results: Results,
    deadline: Deadline,
    device: torch.device,
    measure_one: Measure,
) -> None:
    with closing(build(config, asked.work, [case.memory for case in cases], device)) as load:
        results.content["plan"] = load.handle.plan.to_json()
        for case in cases:
            row = results.begin({**case.row, "gate": case.check.name})
            load.use(case.memory)
            measure_one(load, case, row, results, deadline)
            results.save()
            shown = {name: value for name, value in row.items() if name not in ("steps", "gate", "timeline", "system")}
            tell(f"{'FIT' if asked.fit else 'STEP'} {shown}")
