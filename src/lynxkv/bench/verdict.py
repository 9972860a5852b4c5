"""A program's figures against their bars: printed, and as its exit status."""

import json
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.table import Table


def verdict(figures: Mapping[str, Any], bars: Mapping[str, float], *, as_json: bool) -> int:
    """Print ``figures`` as a table or as one JSON object, with ``bars`` and ``"ok"``; 0 if none is above its bar."""
    ok = all(figures[name] <= bar for name, bar in bars.items())
    told = {**figures, "bars": dict(bars), "ok": ok}
    if as_json:
        print(json.dumps(told))
    else:
        table = Table("figure", "value")
        for name, value in told.items():
            table.add_row(name, f"{value:.4f}" if isinstance(value, float) else str(value))
        Console().print(table)
    return 0 if ok else 1
