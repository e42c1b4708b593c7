"""Machines as data: peaks, bandwidth, memory, links and prices, each figure with its source.

Peaks are of dense matrices and count a multiply-add as two operations. Vendors' pages mix dense
with sparse and fp16 with fp32 accumulation, so what could not be read in a file that we can name
says so. Prices are one list price of one vendor on one day: give your own where money hangs on it.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from octavo.errors import InvalidRequest
from octavo.ops.cost import Hardware

AIC = "AIConfigurator, systems/*.yaml (NVIDIA, Apache-2.0)"
VENDOR = "the vendor's specification, from memory: not checked against a file"
CATALOG = "skypilot-catalog v8, {} on demand, one card, 2026"
CLOCK = "cores x FLOP per cycle x sustained clock, computed from memory of the specification"

TERA, GIGA = 1e12, 1e9


class Figure(NamedTuple):
    """A number (bytes, bytes/s, FLOP/s or US dollars an hour), and where it comes from."""

    value: float
    source: str


class Efficiency(NamedTuple):
    """What a well-written kernel reaches of a peak, and what the peaks do not contain.

    memory, compute, attention: shares of bandwidth and of the matrix peak (for products and for
    attention). op_seconds: launch or barrier, each op. step_seconds: host work, each step.
    """

    memory: float = 0.8
    compute: float = 0.7
    attention: float = 0.5
    op_seconds: float = 3e-6
    step_seconds: float = 1e-3


USUAL = Efficiency()
PEAK = Efficiency(1.0, 1.0, 1.0, 0.0, 0.0)


@dataclass(frozen=True, slots=True)
class Device:
    """One accelerator card or one machine.

    kind: "gpu" or "cpu". bf16, fp8: dense FLOP/s; fp8 None where the hardware has none. memory:
    bytes; None where it is whatever was plugged in. on_chip: caches and scratchpads in words.
    link: bytes/s one way to a neighbour of the same kind, PCIe
    where there is nothing faster. price: dollars an hour.
    """

    name: str
    title: str
    kind: str
    bf16: Figure
    bandwidth: Figure
    memory: Figure | None = None
    fp8: Figure | None = None
    on_chip: str = ""
    link: Figure | None = None
    price: Figure | None = None
    efficiency: Efficiency = USUAL

    @property
    def ridge(self) -> float:
        """FLOP per byte above which the matrix units are the limit, not memory."""
        return self.bf16.value / self.bandwidth.value

    def roofline(self, efficiency: Efficiency | None = None, *, fp8: bool = False) -> Hardware:
        """As `octavo.ops.cost` takes it. Raises InvalidRequest for fp8 where there is none."""
        share = efficiency if efficiency is not None else self.efficiency
        peak = self.bf16
        if fp8:
            if self.fp8 is None:
                raise InvalidRequest(f"{self.name} has no fp8 matrix units", "weights")
            peak = self.fp8
        return Hardware(
            self.name,
            self.bandwidth.value * share.memory,
            peak.value * share.compute,
            self.bf16.value * share.attention,
            share.op_seconds,
            share.step_seconds,
        )

    def priced(self, dollars: float) -> Device:
        """The same machine at the caller's price. Raises InvalidRequest."""
        if not 0.0 <= dollars < math.inf:
            raise InvalidRequest(f"{self.name} cannot cost {dollars:g} dollars an hour", "price")
        return dataclasses.replace(self, price=Figure(dollars, "given by the caller"))


_PRO_6000 = "RTX PRO 6000 Blackwell"


def _gpu(
    name: str,
    title: str,
    figures: tuple[float, float | None, float, float, float | None],
    on_chip: str,
    source: str = AIC,
    price: tuple[float, str] | None = None,
) -> Device:
    """figures: bf16 TFLOP/s, fp8 TFLOP/s, memory GB, bandwidth GB/s, link GB/s one way."""
    bf16, fp8, memory, bandwidth, link = figures
    return Device(
        name, title, "gpu",
        bf16=Figure(bf16 * TERA, source),
        fp8=None if fp8 is None else Figure(fp8 * TERA, source),
        memory=Figure(memory * GIGA, source),
        bandwidth=Figure(bandwidth * GIGA, source),
        link=None if link is None else Figure(link * GIGA, source),
        on_chip=on_chip,
        price=None if price is None else Figure(price[0], CATALOG.format(price[1])),
    )  # fmt: skip


CPU_EFFICIENCY = Efficiency(0.8, 0.6, 0.4, 5e-6, 3e-4)


def _cpu(
    name: str, title: str, bf16: float, bandwidth: float, on_chip: str, memory: float | None = None
) -> Device:
    """bf16 TFLOP/s by clock, bandwidth GB/s of the memory controllers, memory GB."""
    return Device(
        name, title, "cpu",
        bf16=Figure(bf16 * TERA, CLOCK),
        bandwidth=Figure(bandwidth * GIGA, VENDOR),
        memory=None if memory is None else Figure(memory * GIGA, VENDOR),
        on_chip=on_chip,
        efficiency=CPU_EFFICIENCY,
    )  # fmt: skip


_DEVICES = (
    _gpu("a100", "A100 SXM 80 GB", (312, None, 80, 2039, 300), "108 SM x 164 KB, L2 40 MB",
         price=(1.39, "RunPod secure (the PCIe card)")),
    _gpu("h100", "H100 SXM", (989, 1979, 80, 3350, 450), "132 SM x 228 KB, L2 50 MB",
         price=(2.95, "Nebius")),
    _gpu("h200", "H200 SXM", (989, 1979, 141, 4800, 450), "132 SM x 228 KB, L2 50 MB",
         price=(3.50, "Nebius")),
    _gpu("b200", "B200 SXM", (2250, 4500, 180, 7700, 900), "148 SM x 228 KB, L2 126 MB",
         price=(5.50, "Nebius (an eighth of eight)")),
    _gpu("mi300x", "Instinct MI300X", (1307, 2615, 192, 5300, 448),
         "304 CU x 64 KB, L2 32 MB, L3 256 MB", VENDOR),
    _gpu("l4", "L4", (121, 242, 24, 300, 32), "58 SM x 100 KB, L2 48 MB",
         price=(0.44, "JarvisLabs")),
    _gpu("l40s", "L40S", (362, 733, 48, 864, 32), "142 SM x 100 KB, L2 96 MB",
         price=(1.5484, "Nebius")),
    _gpu("rtx-pro-6000", _PRO_6000, (468, 936, 96, 1792, 64), "188 SM x 100 KB, L2 128 MB",
         price=(2.19, "JarvisLabs")),
    _gpu("rtx-4090", "GeForce RTX 4090", (165, 330, 24, 1008, 32), "128 SM x 100 KB, L2 72 MB",
         VENDOR, price=(0.35, "Lium (a marketplace)")),
    _gpu("rtx-5090", "GeForce RTX 5090", (210, 419, 32, 1792, 64), "170 SM x 100 KB, L2 96 MB",
         VENDOR, price=(0.65, "Lium (a marketplace)")),
    _cpu("zen4", "EPYC 9654 (Zen 4, 96 cores, 12 x DDR5-4800)", 19, 461,
         "96 x 1 MB L2, L3 384 MB"),
    _cpu("zen5", "EPYC 9755 (Zen 5, 128 cores, 12 x DDR5-6000)", 50, 576,
         "128 x 1 MB L2, L3 512 MB"),
    _cpu("spr", "Xeon 8480+ (Sapphire Rapids, AMX, 8 x DDR5-4800)", 230, 307,
         "56 x 2 MB L2, L3 105 MB"),
    _cpu("m4-max", "Apple M4 Max (GPU, fp32 rate)", 18, 546, "", 128),
    _cpu("m3-ultra", "Apple M3 Ultra (GPU, fp32 rate)", 28, 819, "", 512),
)  # fmt: skip

DEVICES: Mapping[str, Device] = {device.name: device for device in _DEVICES}

ALIASES = {"4090": "rtx-4090", "5090": "rtx-5090", "pro6000": "rtx-pro-6000",
           "apple": "m4-max", "epyc": "zen4"}  # fmt: skip


def device(name: str) -> Device:
    """The device of that name. Raises InvalidRequest with the nearest names."""
    key = name.lower().replace("_", "-")
    key = ALIASES.get(key, key)
    if key in DEVICES:
        return DEVICES[key]
    near = difflib.get_close_matches(key, DEVICES, 3, 0.4)
    hint = f"; did you mean {', '.join(near)}?" if near else "."
    raise InvalidRequest(
        f"no hardware is called {name!r}{hint} Known: {', '.join(DEVICES)}, here", "hardware"
    )


def measured(bf16: float, bandwidth: float, memory: float, barrier: float = 5e-6) -> Device:
    """This machine, from its measured ceilings: FLOP/s, bytes/s, bytes, and seconds of a barrier.

    The ceilings are those of real loops, so they are taken whole.
    """
    how = "measured here, the best of many short rounds"
    return Device(
        "here",
        "this machine",
        "cpu",
        bf16=Figure(bf16, how),
        bandwidth=Figure(bandwidth, how),
        memory=Figure(memory, "the operating system"),
        efficiency=Efficiency(1.0, 1.0, 0.5, barrier, 3e-4),
    )
