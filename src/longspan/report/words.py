"""Numbers as people read them."""

from __future__ import annotations

import math


def duration(seconds: float) -> str:
    """Write a duration as 42s, 3m07s or 2h05m."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02}s"
    return f"{whole // 3600}h{whole % 3600 // 60:02}m"


def gib(count_bytes: float) -> str:
    """Write bytes in GiB."""
    return f"{count_bytes / 2**30:.1f} GiB"


def short(value: float) -> str:
    """Write a number with up to four digits that count: 0.0123, 1.235, 12,346, 2e-05."""
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    if abs(value) < 1e-3 or abs(value) >= 1e9:
        return f"{value:.3g}"
    digits = max(0, 3 - math.floor(math.log10(abs(value))))
    text = f"{value:,.{digits}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def percent(share: float) -> str:
    """Write a share as a percentage."""
    return f"{100 * share:.1f} %"
