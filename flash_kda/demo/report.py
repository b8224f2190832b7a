"""The report directory: pictures as PNG files, and one HTML page that holds them and the tables."""

from __future__ import annotations

import base64
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path

import jinja2

from flash_kda.demo.agree import EXACT, Agreement
from flash_kda.demo.train import History


@dataclass
class Results:
    """Everything that the demo measured; the page shows it and adds nothing.

    ``samples`` are prompt and continuation; ``surprise`` is an excerpt and the bits of each of its bytes.
    """

    parameters: int
    history: History
    model_bits: float
    baselines: dict[str, float]
    train_bytes: int
    seen_bytes: int
    held_out_bytes: int
    held_out_files: int
    rows: list[Agreement]
    check_bytes: int
    cache_bytes: int
    samples: list[tuple[bytes, bytes]]
    bytes_per_second: float
    excerpt_name: str
    surprise: tuple[bytes, list[float]]
    chunk_tokens: int
    chunk_layer: int
    facts: list[tuple[str, str]]
    images: dict[str, bytes] = field(default_factory=dict)

    @property
    def agreed(self) -> bool:
        return all(row.ok for row in self.rows)


def colour(bits: float) -> str:
    """White at 0 bits through amber to red at 10 and more."""
    x = min(1.0, max(0.0, bits / 10))
    return f"rgba(226, {int(150 - 100 * x)}, {int(60 - 20 * x)}, {0.75 * x**0.8:.2f})"


def surprise_spans(text: bytes, bits: list[float]) -> list[tuple[str, str, str]]:
    """(character, colour, bits as text); the bytes of a character that takes several are shown together."""
    spans: list[tuple[str, str, str]] = []
    start = 0
    while start < len(text):
        end = start + 1
        while end < len(text) and text[end] & 0xC0 == 0x80:
            end += 1
        total = sum(bits[start:end])
        spans.append((text[start:end].decode("utf-8", "replace"), colour(total), f"{total:.1f}"))
        start = end
    return spans


def render(results: Results) -> str:
    """The page; pictures are embedded, so that it is one file that needs nothing else."""
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    source = resources.files("flash_kda.demo").joinpath("report.html").read_text(encoding="utf-8")
    images = {
        name: "data:image/png;base64," + base64.b64encode(data).decode("ascii") for name, data in results.images.items()
    }
    outputs = [r for r in results.rows if r.against == EXACT and r.subject.endswith("output")]
    return environment.from_string(source).render(
        parameters=results.parameters,
        train_seconds=results.history.seconds,
        model_bits=results.model_bits,
        baselines=results.baselines,
        bars=[("this model", results.model_bits), *results.baselines.items()],
        train_bytes=results.train_bytes,
        seen_bytes=results.seen_bytes,
        held_out_bytes=results.held_out_bytes,
        held_out_files=results.held_out_files,
        rows=results.rows,
        agreed=results.agreed,
        passed=sum(row.ok for row in results.rows),
        worst_relative=max(r.worst for r in outputs),
        check_bytes=results.check_bytes,
        cache_bytes=results.cache_bytes,
        samples=[tuple(x.decode("utf-8", "replace") for x in pair) for pair in results.samples],
        bytes_per_second=results.bytes_per_second,
        excerpt_name=results.excerpt_name,
        surprise=surprise_spans(*results.surprise),
        surprise_key=[(colour(bits), str(bits)) for bits in (0, 1, 2, 4, 6, 8, 10)],
        chunk_tokens=results.chunk_tokens,
        chunk_layer=results.chunk_layer,
        facts=results.facts,
        images=images,
    )


def write(results: Results, out: Path) -> Path:
    """Write the pictures and ``index.html`` into ``out``, which is made if need be; returns the page's path."""
    out.mkdir(parents=True, exist_ok=True)
    for name, data in results.images.items():
        (out / f"{name}.png").write_bytes(data)
    page = out / "index.html"
    page.write_text(render(results), encoding="utf-8")
    return page
