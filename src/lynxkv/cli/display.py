"""What the demo shows: two streams filling, and tokens turning from draft to verified."""

from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

_TIERS = ("anchor", "residual", "exact")


class Display:
    """Follows the worker's events; on a terminal live, elsewhere a line a step."""

    def __init__(self, console: Console, *, quiet: bool) -> None:
        self._console = console
        self._quiet = quiet
        self._live = Live(console=console, refresh_per_second=8) if console.is_terminal and not quiet else None
        self._scheme = ""
        self._at = 0.0
        self._total: dict[str, int] = {}
        self._received: dict[str, int] = {}
        self._tokens: dict[int, tuple[str, str]] = {}

    def __enter__(self) -> "Display":
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()

    def show(self, event: dict[str, Any]) -> None:
        """Take one event."""
        match event["event"]:
            case "prompt":
                self._line(f"prompt of {event['tokens']} tokens; it is prefilled once, then held at the prefill node …")
            case "prepared":
                self._line(f"prefilled and encoded in {event['prefill_s']:.1f} s; from here on every time counts")
            case "scheme":
                self._scheme = f"{event['scheme']}: {event['about']}"
                self._total, self._received, self._tokens = event["total"], dict.fromkeys(_TIERS, 0), {}
                if self._live is None:
                    self._line(self._scheme)
            case "segment":
                self._received[event["tier"]] += event["size"]
            case "draft":
                self._tokens[event["position"]] = (event["text"], "italic yellow")
            case "verified":
                self._tokens[event["position"]] = (event["text"], "bold green")
            case "retract":
                for position in [p for p in self._tokens if p >= event["position"]]:
                    self._tokens[position] = (self._tokens[position][0], "strike red")
            case "ran":
                self._ran(event["row"], event["text"])
        self._at = event.get("at", self._at)
        if self._live is not None and self._scheme:
            self._live.update(self._picture())

    def _line(self, text: str) -> None:
        if not self._quiet:
            self._console.print(Text(text, style="dim"))

    def _ran(self, row: dict[str, Any], text: str) -> None:
        drafts = f", {row['accepted']} of {row['drafted']} drafts kept" if row["drafted"] else ""
        self._line(f"{row['scheme']}: first token of its own after {_seconds(row['ttft_draft_s'])} s{drafts}")
        if self._live is None and row["scheme"] == "lynx" and not self._quiet:
            self._console.print(Text(text, style="green"))

    def _picture(self) -> Group:
        streams = Table.grid(padding=(0, 1))
        for tier in _TIERS:
            if total := self._total.get(tier, 0):
                got = self._received[tier]
                bar = ProgressBar(total=total, completed=min(got, total), width=40)
                streams.add_row(tier, bar, f"{got / 1e6:6.1f} of {total / 1e6:.1f} MB")
        answer = Text()
        for position in sorted(self._tokens):
            answer.append(*self._tokens[position])
        title = Text(
            f"{self._scheme}   {self._at:5.1f} s   (yellow: draft, green: verified, struck: withdrawn)", "bold"
        )
        return Group(title, streams, answer)


def table(rows: list[dict[str, Any]], facts: dict[str, Any]) -> Table:
    """The schemes side by side."""
    out = Table(
        title=f"{facts['model']}, {facts.get('prompt_tokens', 0)} tokens, link {facts['link']}; "
        f"prefill took {facts.get('prefill_s', 0):.1f} s and counts for none",
        caption="seconds from the request of a KV that is ready. TTFT draft: the decode node's own first token, "
        "verified or not. equal: to plain decoding on the scheme's own target.",
    )
    out.add_column("scheme")
    for heading in ("MB", "TTFT\nprefill", "TTFT\ndraft", "TTFT\nverified", "TTKT\n(32)", "drafted", "kept", "equal"):
        out.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        out.add_row(
            row["scheme"],
            f"{row['bytes'] / 1e6:.1f}",
            *(_seconds(row[key]) for key in ("ttft_prefill_s", "ttft_draft_s", "ttft_verified_s", "ttkt32_s")),
            str(row["drafted"]),
            str(row["accepted"]),
            "yes" if row["equal"] else "NO",
        )
    return out


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
